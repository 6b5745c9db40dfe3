"""vLLM production-stack's routers that know prefixes: KVAware, PrefixAware and LoadAware.

Source: vllm-project/production-stack @a6c01db0, `routing_logic.py`; LoadAware: the text of PR #1035. Ties: the lowest index.
Differences: lookups use the replicas' reported caches, and whole KV blocks instead of characters.
"""

from cbatch import ConfigError, Request
from cbatch.cluster import ClusterView
from policies.routers.session_hash import SessionHash
from policies.shared.sent_prefixes import SentPrefixes
from policies.shared.ties import Ties


class KVAware(SessionHash):
    """The replica that caches most of the prompt. With none cached, or more than `threshold` tokens uncached: `SessionHash`."""

    depends_on = ("prefix_cache",)

    def __init__(self, threshold: int = 2000) -> None:
        super().__init__()
        if threshold < 0:
            raise ConfigError(f"router: {threshold=} must not be negative")
        self.threshold = threshold

    def _choose(self, request: Request, view: ClusterView) -> int:
        cached = {index: view[index].cached_tokens(request) for index in view.fitting(request)}
        best = max(cached, key=cached.__getitem__)
        if not cached[best] or cached[best] < request.num_prompt_tokens - self.threshold:
            return super()._choose(request, view)
        return best


class PrefixAware:
    """The replica to which most chunks of the prompt were sent before; a partial last chunk is ignored, nothing is forgotten while the replica runs.

    chunk: tokens, rounded down to KV blocks. ties: `random`, the source's rule, or `first`.
    """

    depends_on = ("prefix_cache",)

    def __init__(self, chunk: int = 128, ties: str = "random", seed: int = 0) -> None:
        if not chunk >= 1:
            raise ConfigError(f"router: {chunk=} must be at least 1")
        self.chunk, self._ties = chunk, Ties(ties, seed)
        self._sent: list[SentPrefixes] = []

    def choose(self, request: Request, view: ClusterView) -> int:
        SentPrefixes.renew(self._sent, view)
        chunks, matched = [], dict[int, int]()  # in tokens
        for replica, sent in zip(view, self._sent, strict=True):
            blocks = max(self.chunk // replica.block_size, 1)
            chunks.append(replica.block_hashes(request)[blocks - 1 :: blocks])
            matched[len(matched)] = sent.match(chunks[-1]) * blocks * replica.block_size
        chosen = self._ties.largest({index: matched[index] for index in view.fitting(request)})
        self._sent[chosen].add(chunks[chosen])
        return chosen


class LoadAware:
    """The largest cached share of the prompt, less `beta` for each multiple of the mean load above it; loads are requests."""

    depends_on = ("prefix_cache",)

    def __init__(self, beta: float = 1.0) -> None:
        self.beta = beta

    def choose(self, request: Request, view: ClusterView) -> int:
        able = view.fitting(request)
        mean = sum(view[index].num_unfinished for index in able) / len(able)

        def score(index: int) -> float:
            replica = view[index]
            above = (replica.num_unfinished - mean) / max(1.0, mean)
            return replica.cached_tokens(request) / request.num_prompt_tokens - self.beta * above

        return max(able, key=score)
