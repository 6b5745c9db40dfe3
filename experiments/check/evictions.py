"""What `experiments.check eviction=` tests: the keys of an eviction, and the blocks that are evicted."""

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from cbatch import BlockHash, CachedBlock, Eviction, KVSize, Request, Server
from cbatch.kv.hashes import prompt_hashes
from cbatch.sim import SimExecutor
from experiments.check.plugins import BLOCK, LIMITS, Event, History, Plain, Subject, Workload
from experiments.check.scenario import EVEN_COST, LATER

RULES = {
    "legal": "keys() returns a number, or a tuple of numbers, for each block, and nothing raises",
    "held": "no block that a request holds is evicted",
    "static": "a key depends on its CachedBlock alone: not on time, other blocks or earlier calls; not required with dynamic = True",
    "deterministic": "the same workload evicts the same blocks each time",
    "blind": "no eviction depends on requests that arrive later; not required with on_submit",
}


def subject_of(eviction: Eviction) -> Subject:
    """Returns the eviction as the subject of a check."""
    looks_ahead = type(eviction).on_submit is not Eviction.on_submit
    needed = {"legal", "held", "static" * (not eviction.dynamic), "blind" * (not looks_ahead)} - {""}
    return Subject(type(eviction).__name__, partial(_serve, eviction), RULES, frozenset(needed), hides_length=False)


class _Watched:
    """Calls an eviction, and copies of it whose keys are compared. problems: explains each violated property, by its name."""

    def __init__(self, inner: Eviction) -> None:
        self.inner, self.problems = inner, dict[str, str]()
        self._seen: dict[CachedBlock, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[Any]:
        if self.inner.dynamic:  # keys of earlier calls no longer count
            self._seen.clear()
        before, keys = deepcopy(self.inner), [*self.inner.keys(blocks, now)]
        if len(keys) != len(blocks):
            return keys

        def again(of: Sequence[CachedBlock], at: float) -> Sequence[Any]:
            return deepcopy(before).keys(of, at)

        seen = {block: key for block, key in self._seen.items() if block not in blocks}
        self._seen |= zip(blocks, keys, strict=True)
        for when, known, others in (
            (f"{LATER:g} s later", self._of(blocks), again(blocks, now + LATER)),
            ("alone", self._of(blocks), [again([block], now)[0] for block in blocks]),
            ("in a later call", seen, again([*seen], now)),
        ):
            for (block, key), other in zip(known.items(), others, strict=False):
                if key != other:
                    why = f"the block of tokens {block.start} to {block.end} has the key {key}, {when} {other}"
                    self.problems.setdefault("static", why)
        return keys

    def on_admit(self, request: Request, hashes: Sequence[BlockHash], now: float) -> None:
        self.forget(hashes)
        self.inner.on_admit(request, hashes, now)

    def forget(self, hashes: Container[BlockHash]) -> None:
        """Forgets the keys of blocks that are evicted, or taken by a request: they get others at their release."""
        self._seen = {block: key for block, key in self._seen.items() if block.hash not in hashes}

    def _of(self, blocks: Sequence[CachedBlock]) -> Mapping[CachedBlock, Any]:
        return {block: self._seen[block] for block in blocks}


def _serve(eviction: Eviction, workload: Workload) -> History:
    kv = KVSize(workload.num_blocks, BLOCK)
    server = Server(SimExecutor(EVEN_COST), LIMITS, EVEN_COST, kv, prefix_cache=eviction)
    requests = workload.made()
    names = defaultdict[BlockHash, str](lambda: "a block with new tokens")
    for request in requests:
        for place, block_hash in enumerate(prompt_hashes(request, BLOCK)):
            names[block_hash] = f"tokens {place * BLOCK} to {(place + 1) * BLOCK} of {request.session}"
    engine = server.engine(Plain(), requests)
    cache: Any = engine.state.cache
    pool, named_alike = cache.pool, type(type(eviction).__name__, (_Watched,), {})  # errors name the class
    watched = named_alike(pool.eviction)
    if type(eviction).keys is not Eviction.keys:  # else the order is that of release, and no key is asked for
        pool.eviction = watched
    events, problems, cursor = list[Event](), watched.problems, pool.changes.begin()

    def look(_: object) -> None:
        nonlocal cursor
        changed, cursor = pool.changes.since(cursor), pool.changes.begin()
        gone = [block_hash for block_hash in changed if block_hash not in pool]
        watched.forget(gone)
        events.extend(Event(engine.executor.now(), f"evicts {names[each]}") for each in gone)
        for request in engine.state.running:
            hashes = request._prefix.hashes(0)[: pool.num_hashed[request._row]]
            for block_hash in {*hashes} & {*gone}:
                problems.setdefault("held", f"request {request.id} holds {names[block_hash]}, which is evicted")

    engine.run(look)
    return History(events, problems)
