"""NVIDIA Dynamo's KV router: uncached prompt work against the blocks that decode, by its new or its old rule.

new (ai-dynamo/dynamo @01690d42, `lib/kv-router/src/scheduling/selector.rs`): the least
    scale * max(0, (prompt tokens left + prompt tokens) / block size - overlap * decay * cached blocks) + decode blocks + active * requests
    with decay = 1 / (1 + falloff * (prefill blocks above the replica with fewest) / blocks of the prompt).
old (@00564be8): the most 2 * cached tokens / prompt tokens - share of KV blocks in use - waiting / most waiting.

Decode blocks are those with this request, blocks that active prompts share counted once. The router's own books have the prompt tokens
left: uncached ones when sent, removed when the whole prompt is in the cache or in flight. `temperature` above 0 draws from a softmax of
-cost / ((most - least) * temperature). Left out: lower tiers, and the queue in the router itself.
"""

from math import exp
from random import Random

from cbatch import ConfigError, Request
from cbatch.cluster import ClusterView, ReplicaView, Role
from policies.shared.ties import Ties


class Dynamo:
    depends_on = ("prefix_cache",)

    def __init__(
        self,
        rule: str = "new",
        overlap: float = 1.0,
        scale: float = 1.0,
        active: float = 0.0,
        falloff: float = 0.0,
        temperature: float = 0.0,
        ties: str = "random",
        seed: int = 0,
    ) -> None:
        if rule not in ("new", "old"):
            raise ConfigError(f"router: {rule=} must be new or old")
        if min(overlap, scale, active, falloff, temperature) < 0:
            raise ConfigError(
                f"router: {overlap=}, {scale=}, {active=}, {falloff=} and {temperature=} must not be negative"
            )
        self.rule, self.overlap, self.scale, self.active, self.falloff = rule, overlap, scale, active, falloff
        self.temperature, self._ties, self._random = temperature, Ties(ties, seed), Random(seed)
        self._uncached: dict[int, int] = {}  # prompt tokens when sent, by id

    def choose(self, request: Request, view: ClusterView) -> int:
        scores = (self._new if self.rule == "new" else self._old)(request, view)
        if self.temperature and (spread := max(scores.values()) - min(scores.values())):
            weights = [exp((score - max(scores.values())) / (spread * self.temperature)) for score in scores.values()]
            (chosen,) = self._random.choices([*scores], weights)
        else:
            chosen = self._ties.largest(scores)
        if view.stage is Role.PREFILL:  # the decoder, which push chooses at once, computes no prompt
            self._uncached[request.id] = request.num_prompt_tokens - view[chosen].cached_tokens(request)
        return chosen

    def on_end(self, request: Request) -> None:
        self._uncached.pop(request.id, None)

    def _new(self, request: Request, view: ClusterView) -> dict[int, float]:
        prefills = {index: self._prefill_blocks(view[index]) for index in view.fitting(request)}
        least, scores = min(prefills.values()), dict[int, float]()
        for index, blocks in prefills.items():
            replica = view[index]
            own = request.num_prompt_tokens / replica.block_size
            credit = replica.cached_tokens(request) / replica.block_size
            credit *= self.overlap / (1 + self.falloff * (blocks - least) / own)
            work = self.scale * max(0.0, blocks + own - credit) + self.active * replica.num_unfinished
            scores[index] = -(work + replica.prompt_blocks_with(request))
        return scores

    def _prefill_blocks(self, replica: ReplicaView) -> float:
        return sum(self._uncached.get(sent.id, 0) for sent, _ in replica.prompts_left()) / replica.block_size

    def _old(self, request: Request, view: ClusterView) -> dict[int, float]:
        shown = {index: view[index] for index in view.fitting(request)}
        most = max(each.num_waiting for each in shown.values()) or 1
        return {
            index: 2 * each.cached_tokens(request) / request.num_prompt_tokens - each.kv_use - each.num_waiting / most
            for index, each in shown.items()
        }
