"""TaiChi's hybrid (arXiv 2508.01989), as far as it could be read: all replicas do both, some with large chunks, the others with small ones.

The prompt goes to the replica with the fewest prompt tokens left among those that are predicted to meet the objective of the TTFT, or to a random one. The
output begins on the replica of the small-chunk pool with the least KV cache, by the longest lengths of its requests. Ties: the first replica. Not built: the moves of the longest outputs
above 95% of memory, and back above 0.96 of the TPOT's objective.

Give the replicas pools of role=both whose policies differ in their chunks; the first `large` replicas are the ones with large chunks.
"""

from random import Random

from cbatch import ConfigError, Request
from cbatch.cluster import ClusterView, Route


class TaiChi:
    moves = divides = True

    def __init__(self, large: int = 1, ttft: float = 1.0, seed: int = 0) -> None:
        """ttft: seconds, for requests without an objective of their own."""
        if not (large >= 1 and ttft > 0):
            raise ConfigError(f"router: need {large=} of at least 1 and {ttft=} above 0")
        self.large, self.ttft, self._random = large, ttft, Random(seed)

    def choose(self, request: Request, view: ClusterView) -> Route:
        if self.large >= len(view):
            raise ConfigError(f"router: large={self.large} leaves none of {len(view)} replicas for small chunks")
        able, within = view.fitting(request), request.slo.ttft or self.ttft

        def predicted(index: int) -> float:
            return view[index].predicted_wait + view[index].prefill_seconds(request, request.num_prompt_tokens)

        feasible = [index for index in able if predicted(index) <= within]
        if feasible:
            prefill = min(feasible, key=lambda index: view[index].prompt_tokens_left)
        else:
            prefill = self._random.choice(able)
        small = [index for index in able if index >= self.large] or able
        return Route(prefill, min(small, key=lambda index: view[index].kv_committed))
