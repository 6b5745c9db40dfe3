"""Decoder first, then a remote prefill only above a threshold of uncached prompt tokens there: llm-d's decider, and Dynamo's conditional one.

The decoder is the replica with the largest weighted sum of its cached share of the prompt and of the emptiness of its queue (llm-d's P/D sample: 2 and 1). The
prompt is computed remotely iff at least `threshold` tokens are not cached there (llm-d's sample: 16; 0: never), by the replica with the fewest prompt
tokens left. `ties`: `random`, the rule of both sources, or `first`.
"""

from cbatch import ConfigError, Request
from cbatch.cluster import ClusterView, Role, Route
from policies.shared.ties import Ties


class RemoteAbove:
    depends_on = ("prefix_cache",)
    moves = True

    def __init__(
        self, threshold: int = 16, prefix: float = 2.0, queue: float = 1.0, ties: str = "random", seed: int = 0
    ) -> None:
        if min(threshold, prefix, queue) < 0:
            raise ConfigError(f"router: {threshold=}, {prefix=} and {queue=} must not be negative")
        self.threshold, self.prefix, self.queue, self._ties = threshold, prefix, queue, Ties(ties, seed)

    def choose(self, request: Request, view: ClusterView) -> Route:
        decoders = view.fitting(request, Role.DECODE)
        waiting = [view[index].num_waiting for index in decoders]
        most, spread = max(waiting), max(waiting) - min(waiting)

        def score(index: int) -> float:
            is_short = (most - view[index].num_waiting) / spread if spread else 1.0
            return self.prefix * view[index].cached_tokens(request) / request.num_prompt_tokens + self.queue * is_short

        decode = self._ties.largest({index: score(index) for index in decoders})
        uncached = request.num_prompt_tokens - view[decode].cached_tokens(request)
        prefillers = view.fitting(request, Role.PREFILL)
        if not self.threshold or uncached < self.threshold or not prefillers:
            return Route(decode, decode)
        return Route(self._ties.largest({index: -view[index].prompt_tokens_left for index in prefillers}), decode)
