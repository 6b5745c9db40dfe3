"""The shortest predicted time to first token: Mooncake's conductor (FAST 2025, algorithm 1) without roles.

TTFT = seconds of the prompts left at the replica + seconds of the tokens of this prompt that its cache lacks, both by the cost model
for one prompt at a time. The paper's T_queue and T_prefill are fitted offline. Ties: the first replica.

Without `copy_above` this is the paper's "local cache aware". With it, "global": where the longest match of all replicas is more than
`copy_above` times the own one, the replica gets the rest of it, for `token_seconds` per token, and computes less. Of several longest
matches the first is copied. With roles the decoder is the one with the fewest requests, as prompts do not tell decoders apart.
"""

from cbatch import Request
from cbatch.cluster import ClusterView, Role, Route


class ShortestTTFT:
    depends_on = ("prefix_cache",)

    def __init__(self, copy_above: float | None = None, token_seconds: float = 1e-6) -> None:
        """copy_above: the paper's threshold, which it does not print."""
        self.copy_above, self.token_seconds, self.moves = copy_above, token_seconds, copy_above is not None

    def choose(self, request: Request, view: ClusterView) -> int | Route:
        def fewest(decoders: list[int]) -> int:
            return min(decoders, key=lambda index: view[index].num_unfinished)

        able = view.fitting(request)
        if view.stage is Role.DECODE:
            return fewest(able)
        cached = {index: view[index].cached_tokens(request) for index in able}
        best = max(able, key=cached.__getitem__)

        def copied(index: int) -> int:
            copies = self.copy_above is not None and cached[best] > self.copy_above * cached[index]
            return cached[best] - cached[index] if copies else 0

        def ttft(index: int) -> float:
            replica, sent = view[index], copied(index)
            uncached = request.num_prompt_tokens - cached[index] - sent
            return sent * self.token_seconds + replica.predicted_wait + replica.prefill_seconds(request, uncached)

        chosen = min(able, key=ttft)
        if not copied(chosen):
            return chosen
        stays = view[chosen].role is not Role.PREFILL
        return Route(chosen, chosen if stays else fewest(view.fitting(request, Role.DECODE)), best)
