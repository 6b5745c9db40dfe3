"""LMetric (arXiv 2603.15202): the smallest product of the work and the batch of a replica.

Work = uncached prompt tokens of this request + remaining prompt tokens there, at least 1. Batch = unfinished requests there and, with
`counts_itself`, this one. The abstract leaves open how zeros and ties count; here the first replica is taken on a tie.
"""

from cbatch import Request
from cbatch.cluster import ClusterView


class LMetric:
    depends_on = ("prefix_cache",)

    def __init__(self, counts_itself: bool = True) -> None:
        self.counts_itself = counts_itself

    def choose(self, request: Request, view: ClusterView) -> int:
        def product(index: int) -> int:
            replica = view[index]
            uncached = request.num_prompt_tokens - replica.cached_tokens(request)
            return max(uncached + replica.prompt_tokens_left, 1) * (replica.num_unfinished + self.counts_itself)

        return min(view.fitting(request), key=product)
