"""SGLang's router `cache_aware`: the replica to which most of the prompt was sent before, unless loads are too unequal.

1. The most loaded replica has more than `balance_abs` requests above the least loaded one, and more than `balance_rel` times as many: the
   least loaded replica. 2. A share above `threshold` of the prompt was sent to a replica: that replica. 3. Otherwise the least loaded
   (`fallback=load`, the code) or the one with the smallest tree (`fallback=tree`, its documentation and earlier versions).

Source: sgl-project/sglang, `sgl-model-gateway/src/policies/cache_aware.rs` @053b63ff; the defaults are those of its launcher, the Rust
struct has 0.5, 32, 1.1, 30 s, 10,000. Differences: whole KV blocks of tokens in place of characters, ties take the lowest index, and
trees are trimmed at the first arrival after an interval. Ends are known when replicas report them.
"""

from cbatch import ConfigError, Request
from cbatch.cluster import ClusterView
from policies.shared.sent_prefixes import SentPrefixes


class CacheAware:
    depends_on = ("prefix_cache",)

    def __init__(
        self,
        threshold: float = 0.3,
        balance_abs: int = 64,
        balance_rel: float = 1.5,
        fallback: str = "load",
        max_tree_size: int = 2**26,
        eviction_interval: float = 60.0,
    ) -> None:
        """max_tree_size: tokens per replica. eviction_interval: seconds."""
        if fallback not in ("load", "tree"):
            raise ConfigError(f"router: {fallback=} must be load or tree")
        if min(threshold, balance_abs, balance_rel, max_tree_size) < 0 or not eviction_interval > 0:
            problem = f"{threshold=}, {balance_abs=}, {balance_rel=} or {max_tree_size=} below 0"
            raise ConfigError(f"router: {problem}, or {eviction_interval=} not above 0")
        self.threshold, self.balance_abs, self.balance_rel = threshold, balance_abs, balance_rel
        self.fallback, self.max_tree_size, self.eviction_interval = fallback, max_tree_size, eviction_interval
        self._trees: list[SentPrefixes] = []
        self._trimmed_at = 0.0

    def choose(self, request: Request, view: ClusterView) -> int:
        SentPrefixes.renew(self._trees, view)
        self._trim(view)
        chosen = self._choose(request, view)
        self._trees[chosen].add(view[chosen].block_hashes(request))
        return chosen

    def _choose(self, request: Request, view: ClusterView) -> int:
        loads = {index: view[index].num_unfinished for index in view.fitting(request)}
        able, most, least = [*loads], max(loads.values()), min(loads, key=loads.__getitem__)
        if most - loads[least] > self.balance_abs and most > self.balance_rel * loads[least]:
            return least
        matched = {index: self._trees[index].match(view[index].block_hashes(request)) for index in able}
        sent = {index: number * view[index].block_size for index, number in matched.items()}
        best = max(able, key=sent.__getitem__)
        self._trees[best].touch(view[best].block_hashes(request)[: matched[best]])
        if sent[best] > self.threshold * request.num_prompt_tokens:
            return best
        return least if self.fallback == "load" else min(able, key=lambda index: len(self._trees[index]))

    def _trim(self, view: ClusterView) -> None:
        if view.now >= self._trimmed_at + self.eviction_interval:
            self._trimmed_at = view.now
            for tree, replica in zip(self._trees, view, strict=False):
                tree.trim(self.max_tree_size // replica.block_size)
