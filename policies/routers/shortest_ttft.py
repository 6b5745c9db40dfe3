"""The shortest predicted time to first token: Mooncake's conductor (FAST 2025, algorithm 1) without transfers and roles.

TTFT = seconds of the prompts left at the replica + seconds of the tokens of this prompt that its cache lacks, both by the cost model
for one prompt at a time. The paper's T_queue and T_prefill are fitted offline. Ties: the first replica. The paper's "global"
variant also copies blocks from the best match; this one is its "local cache aware".
"""

from cbatch import Request
from cbatch.cluster import ClusterView


class ShortestTTFT:
    depends_on = ("prefix_cache",)

    def choose(self, request: Request, view: ClusterView) -> int:
        def ttft(index: int) -> float:
            replica = view[index]
            uncached = request.num_prompt_tokens - replica.cached_tokens(request)
            return replica.predicted_wait + replica.prefill_seconds(request, uncached)

        return min(view.fitting(request), key=ttft)
