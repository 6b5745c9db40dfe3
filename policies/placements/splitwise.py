"""Splitwise's two pools and a mixed one (Patel et al., ISCA 2024; its simulator at 8f99e7dc). Both replicas are chosen at the arrival.

Prompt: the fewest pending prompt tokens in the prompt pool, refused if its queue is not empty and pending + prompt exceed `most`; then the same among
mixed replicas. Token: the least KV cache in the token pool, by the longest lengths of its requests, refused if the request's longest length does not fit; then mixed. Else a
replica of the other pool becomes mixed until it is idle; else one replica does both. The token replica is chosen before the prompt replica is marked.
Ties: the first replica. Replicas have role=both: the pools are the first `prompts` of them, and the others. A mixed iteration costs what the
cost model says, not the simulator's 1.1 times.
"""

from cbatch import ConfigError, Request
from cbatch.cluster import ClusterView, Route


class Splitwise:
    moves = divides = True

    def __init__(self, prompts: int = 1, most: int = 8192) -> None:
        if not (prompts >= 1 and most >= 1):
            raise ConfigError(f"router: need {prompts=} and {most=} of at least 1")
        self.prompts, self.most = prompts, most
        self._mixed: list[int] = []

    def choose(self, request: Request, view: ClusterView) -> Route:
        if self.prompts >= len(view):
            raise ConfigError(f"router: prompts={self.prompts} leaves none of {len(view)} replicas for tokens")
        self._mixed = [index for index in self._mixed if view[index].num_unfinished]
        able = view.fitting(request)
        home, mixed = [i for i in able if i not in self._mixed], [i for i in able if i in self._mixed]
        prompts, tokens = [i for i in home if i < self.prompts], [i for i in home if i >= self.prompts]
        decode = next((i for pool in (tokens, mixed) if (i := self._for_tokens(request, view, pool)) is not None), None)
        prefill = next(
            (i for pool in (prompts, mixed) if (i := self._for_prompt(request, view, pool)) is not None), None
        )
        if prefill is None and tokens:
            prefill = min(tokens, key=lambda index: view[index].prompt_tokens_left)
            self._mixed.append(prefill)
        if decode is None and (left := [index for index in prompts if index not in self._mixed]):
            decode = min(left, key=lambda index: view[index].kv_committed)
            self._mixed.append(decode)
        if prefill is None:
            prefill = decode if decode is not None else able[0]
        return Route(prefill, prefill if decode is None else decode)

    def _for_prompt(self, request: Request, view: ClusterView, pool: list[int]) -> int | None:
        if not pool:
            return None
        least = min(pool, key=lambda index: view[index].prompt_tokens_left)
        pending = view[least].prompt_tokens_left
        return None if pending and pending + request.num_prompt_tokens > self.most else least

    def _for_tokens(self, request: Request, view: ClusterView, pool: list[int]) -> int | None:
        if not pool:
            return None
        least = min(pool, key=lambda index: view[index].kv_committed)
        replica = view[least]
        return (
            None
            if replica.kv_committed + request.max_tokens / (replica.num_blocks * replica.block_size) >= 1
            else least
        )
