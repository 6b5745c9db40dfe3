"""Mooncake's conductor with early rejection (Qin et al., FAST 2025, algorithm 1; arXiv 2407.00079 for overload), without copies between prefillers.

Prefiller: the shortest predicted queue and prefill of what it lacks. Decoder: the fewest unfinished requests. The request is rejected at the arrival if the TTFT
exceeds its objective, or if the decoders' load exceeds 1:

    current     (decodes now + 1) / capacity
    predicted   at the time t' when this prefill will have ended: (decodes alive + 1) / capacity, all outputs taking `output_seconds`

A decode is alive at t' if its prefill ended before t' and its end lies after t'; an end at t' does not count. Ties: the first replica.
"""

from collections.abc import Iterable
from typing import Literal

from cbatch import ConfigError, Request
from cbatch.cluster import ClusterView, Reject, Role, Route


class Mooncake:
    depends_on = ("prefix_cache",)
    moves = True

    def __init__(
        self,
        rule: Literal["current", "predicted"] = "predicted",
        capacity: int = 128,
        output_seconds: float = 10.0,
        ttft: float = 30.0,
    ) -> None:
        """capacity: requests that a decoder serves at once. ttft: seconds, for requests without an objective of their own."""
        if rule not in ("current", "predicted"):
            raise ConfigError(f"router: {rule=} must be current or predicted")
        if not (capacity >= 1 and output_seconds > 0 and ttft > 0):
            raise ConfigError(f"router: need {capacity=} of at least 1, {output_seconds=} and {ttft=} above 0")
        self.rule, self.capacity, self.output_seconds, self.ttft = rule, capacity, output_seconds, ttft
        self._begins: dict[int, float] = {}  # predicted ends of prefills, by id

    def choose(self, request: Request, view: ClusterView) -> Route | Reject:
        def ttft(index: int) -> float:
            uncached = request.num_prompt_tokens - view[index].cached_tokens(request)
            return view[index].predicted_wait + view[index].prefill_seconds(request, uncached)

        prefill = min(view.fitting(request), key=ttft)
        seconds, decoders = ttft(prefill), view.fitting(request, Role.DECODE)
        if seconds > (request.slo.ttft or self.ttft):
            return Reject(f"predicted TTFT {seconds:.3g} s")
        at = view.now if self.rule == "current" else view.now + seconds
        number = num_alive(self._begins.values(), at, self.output_seconds, self.rule == "current")
        if number + 1 > self.capacity * len(decoders):
            return Reject(f"{number} decodes at {at:.3g} s")
        self._begins[request.id] = view.now + seconds
        return Route(prefill, min(decoders, key=lambda index: view[index].num_unfinished))

    def on_end(self, request: Request) -> None:
        self._begins.pop(request.id, None)


def num_alive(begins: Iterable[float], at: float, output_seconds: float, is_known: bool = False) -> int:
    """Returns how many decodes are alive at a time. is_known: `at` is now, and what has ended was taken out of `begins`."""
    if is_known:
        return sum(begin <= at for begin in begins)
    return sum(begin < at < begin + output_seconds for begin in begins)
