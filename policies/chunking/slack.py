"""The largest chunk whose iteration is predicted to end before any decode's next token is due: QoServe (ASPLOS 2026).

A request's first token is due `slo.ttft` after its arrival, and each further token `slo.tbt` later, counted from the first token if
that was late. Sizes, margin and defaults come from the authors' code (microsoft/sarathi-serve, niyama_asplos2026); `view.cost`
predicts iterations instead of the code's two fitted lines.
"""

from math import inf

from cbatch import BatchShape, Request, View
from policies.chunking.selector import ChunkSelector

SIZES = (128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2552)
LARGEST_WHEN_CROWDED, CROWDED = 512, 32_000  # tokens of an iteration; free tokens of KV cache
MARGIN = 1.2
INTERACTIVE_TBT, OTHER_TBT = 0.05, 0.4  # seconds, of requests with and without an objective for the first token


class Slack(ChunkSelector):
    def __init__(self) -> None:
        self._times: dict[
            Request, tuple[float, float]
        ] = {}  # when the first token was due or there, and between tokens

    def num_tokens(self, view: View, num_decodes: int) -> int:
        decoding = [(request, request.num_tokens) for request in view.decoding]
        context = sum(num_tokens for _, num_tokens in decoding)
        slack = (
            min((self._due(request, num_tokens, view.now) for request, num_tokens in decoding), default=inf) - view.now
        )
        most = view.limits.max_tokens
        if view.kv.num_free * view.kv.block_size < CROWDED:
            most = min(most, LARGEST_WHEN_CROWDED)
        sizes = [size for size in SIZES if num_decodes < size <= most] or [view.limits.max_tokens]
        for size in reversed(sizes):
            if MARGIN * view.cost.predict(BatchShape(((size - num_decodes, 0),), num_decodes, context)) <= slack:
                return size - num_decodes
        return sizes[0] - num_decodes

    def observe(self, request: Request) -> None:
        self._times.pop(request, None)

    def _due(self, request: Request, num_tokens: int, now: float) -> float:
        """Returns when the next token of a decoding request is due, in seconds."""
        times = self._times.get(request)
        if times is None:
            ttft = request.slo.ttft
            tbt = request.slo.tbt or (OTHER_TBT if ttft is None else INTERACTIVE_TBT)
            times = self._times[request] = max(now, request.arrival_time + (ttft or 0.0)), tbt
        return times[0] + times[1] * (num_tokens - request.num_prompt_tokens)
