"""What `experiments.check` says of evictions and routers: the built-in ones, and some that lack one property each."""

import random
from collections.abc import Sequence

import pytest

from cbatch import CachedBlock, Eviction, Request
from cbatch.cluster import ClusterView, Router
from cbatch.kv import PrefixPool
from cbatch.request import spec_of
from experiments.check import evictions, routers
from experiments.check.__main__ import main
from experiments.check.plugins import find, workloads
from policies.evictions import FIFO, LFU, LRU, SLRU, TLRU, Belady, Marconi, SoftTTL
from policies.placements import DistServe, Mooncake, RemoteAbove, Splitwise, TaiChi
from policies.routers import ROUTERS

NUMBER = 6
"""Workloads, of 2 to 11 requests."""


class Aging(Eviction):
    def keys(self, blocks: Sequence[CachedBlock], now: float) -> list[float]:
        return [now - block.released_at for block in blocks]


class Relative(Eviction):
    def keys(self, blocks: Sequence[CachedBlock], now: float) -> list[int]:
        return [block.created - min(other.created for other in blocks) for block in blocks]


class Counting(Eviction):
    calls = 0

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> list[int]:
        self.calls += 1
        return [self.calls] * len(blocks)


class TooFew(Eviction):
    def keys(self, blocks: Sequence[CachedBlock], now: float) -> list[int]:
        return [0]


class Shuffling(Eviction):
    dynamic = True

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> list[float]:
        return [random.random() for _ in blocks]


@pytest.mark.parametrize(
    ("eviction", "lacking"),
    [
        *((eviction, {}) for eviction in (LRU(), FIFO(), LFU(), SLRU(), TLRU(8, 4))),
        (SoftTTL(5.0), {"static": "900 s later"}),
        (Marconi(1.0), {"static": "alone"}),
        (Belady(), {"blind": "without the last request, the run evicts"}),  # it says when keys have changed
        (Aging(), {"static": "900 s later"}),
        (Relative(), {"static": "alone"}),
        (Counting(), {"static": "in a later call"}),
        (TooFew(), {"legal": "eviction TooFew: keys() (returned 1 keys)"}),
        (Shuffling(), {"static": "", "deterministic": "run evicts"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Eviction) else "",
)
def test_what_an_eviction_lacks(eviction: Eviction, lacking: dict[str, str]) -> None:
    subject = evictions.subject_of(eviction)
    found = find(subject, NUMBER, lambda: None)
    assert found.keys() == lacking.keys() and all(why in found[name] for name, why in lacking.items()), found
    assert ("static" in subject.needed) == (not eviction.dynamic)
    assert ("blind" in subject.needed) == (not isinstance(eviction, Belady))


@pytest.mark.long
def test_keys_that_the_cache_asks_for_again_may_change() -> None:
    """Some of the 40 workloads have a block with two copies, which is spare as long as a request holds the other one."""
    assert find(evictions.subject_of(Belady()), 40, lambda: None).keys() == {"blind"}


def test_a_held_block_that_is_evicted_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool in place of ours, which never does it: each eviction also makes the last block of a running request unknown."""
    evict, lost = PrefixPool._evict, set[object]()

    def and_a_held_one(pool: PrefixPool) -> int:
        held = [pool._hashes[block] for block in range(pool.num_blocks) if pool.live[block]]
        hashes = [block_hash for block_hash in held if block_hash is not None][-1:]
        lost.update(hashes)
        pool.changes.add(hashes)
        return evict(pool)

    monkeypatch.setattr(PrefixPool, "_evict", and_a_held_one)
    monkeypatch.setattr(PrefixPool, "__contains__", lambda pool, each: each in pool._blocks and each not in lost)
    assert "which is evicted" in find(evictions.subject_of(FIFO()), NUMBER, lambda: None)["held"]


class First:
    def choose(self, request: Request, view: ClusterView) -> int:
        return 0


class Peeking:
    def choose(self, request: Request, view: ClusterView) -> int:
        return view.fitting(request)[(spec_of(request).true_new_tokens or 0) % 2]


class Throwing:
    def choose(self, request: Request, view: ClusterView) -> int:
        return random.choice(view.fitting(request))


@pytest.mark.parametrize(
    ("router", "lacking"),
    [
        *(
            (router, {})
            for router in (make() for make in (*ROUTERS.values(), DistServe, Mooncake, RemoteAbove, Splitwise, TaiChi))
        ),
        (First(), {"legal": "choose from view.fitting(request)"}),
        (Peeking(), {"blind": "if the last request ended after"}),
        (Throwing(), {"deterministic": "run sends request"}),
    ],
    ids=lambda value: "" if isinstance(value, dict) else type(value).__name__,
)
def test_what_a_router_lacks(router: Router, lacking: dict[str, str]) -> None:
    found = find(routers.subject_of(router), NUMBER, lambda: None)
    assert found.keys() == lacking.keys() and all(why in found[name] for name, why in lacking.items()), found


def test_workloads_grow_and_share_prefixes() -> None:
    drawn = [workload.requests for workload in workloads(12)]
    sizes = [len(requests) for requests in drawn]
    assert sizes == sorted(sizes) and (sizes[0], sizes[-1]) == (2, 12)
    starts = [request.prefix_hashes[0] for request in drawn[-1]]
    assert len({*starts}) < len(starts)


@pytest.mark.parametrize(
    ("words", "status", "printed"),
    [
        (["eviction=lru"], 0, "\nno counterexample to legal, held, static, blind\n"),
        (["eviction=test_plugins.Aging"], 1, "\nstatic         NO   "),
        (["eviction=soft_ttl", "eviction.ttl=3", "require=static"], 1, "\nstatic         NO   "),
        (["router=lmetric"], 0, "\nblind          yes  "),
        (["backend.router=test_plugins.Throwing"], 0, "\nblind          -    "),
        (["backend.router=test_plugins.Throwing"], 0, "\nno counterexample to legal\n"),  # blind was not tested
        (["router=test_plugins.First"], 1, "\nlegal          NO   "),
        (["eviction=lru", "chunk=3"], 2, "error: chunk: has no effect on a check of an eviction"),
        (["router=lmetric", "require=blin"], 2, "error: require=blin: no such property; did you mean blind?"),
    ],
)
def test_the_command(words: list[str], status: int, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "random=12"]) == status
    assert printed in "".join(capsys.readouterr())
