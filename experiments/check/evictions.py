"""What `experiments.check eviction=` tests: the keys of an eviction, and the blocks that are evicted."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from cbatch import BlockHash, CachedBlock, Eviction, KVSize, Server
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

    def __init__(self, inner: Eviction, pool: Any) -> None:
        self.inner, self.pool, self.problems = inner, pool, dict[str, str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[Any]:
        before, keys = deepcopy(self.inner), [*self.inner.keys(blocks, now)]
        if len(keys) != len(blocks):
            return keys

        def again(of: Sequence[CachedBlock], at: float) -> Sequence[Any]:
            return deepcopy(before).keys(of, at)

        new, kept = dict(zip(blocks, keys, strict=True)), self._kept()
        for when, known, others in (
            (f"{LATER:g} s later", new, again(blocks, now + LATER)),
            ("alone", new, [again([block], now)[0] for block in blocks]),
            ("in a later call", kept, again([*kept], now)),
        ):
            for (block, key), other in zip(known.items(), others, strict=False):
                if key != other:
                    why = f"the block of tokens {block.start} to {block.end} has the key {key}, {when} {other}"
                    self.problems.setdefault("static", why)
        return keys

    def _kept(self) -> Mapping[CachedBlock, Any]:
        """Returns the keys of earlier calls that the cache still uses."""
        leaves, pool, unranked = self.pool._leaves, self.pool, self.pool._leaves._unranked
        ranked = ((key, block) for key, _, block, ranking in leaves._heap if ranking == leaves._ranking[block])
        return {pool._describe(block): key for key, block in ranked if block not in unranked and pool._is_leaf(block)}


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
    watched = named_alike(pool.eviction, pool)
    if type(eviction).keys is not Eviction.keys:  # else the order is that of release, and no key is asked for
        pool.eviction = watched
    events, problems, cursor = list[Event](), watched.problems, pool.changes.begin()

    def look(_: object) -> None:
        nonlocal cursor
        changed, cursor = pool.changes.since(cursor), pool.changes.begin()
        gone = [block_hash for block_hash in changed if block_hash not in pool]
        events.extend(Event(engine.executor.now(), f"evicts {names[each]}") for each in gone)
        for request in engine.state.running:
            hashes = request._prefix.hashes(0)[: pool.num_hashed[request._row]]
            for block_hash in {*hashes} & {*gone}:
                problems.setdefault("held", f"request {request.id} holds {names[block_hash]}, which is evicted")

    engine.run(look)
    return History(events, problems)
