"""Which block goes, on the worked examples of each rule's source; `tests/kv/test_prefix_pool.py` has those of recency and Belady."""

import pytest

from cbatch import CachedBlock, ConfigError, Eviction, Request
from cbatch.kv import PrefixPool
from policies.evictions import TLRU, Marconi, SoftTTL


def block(name: str = "", start: int = 0, end: int = 1, holder: int = 0, released_at: float = 0.0) -> CachedBlock:
    return CachedBlock(name, start, end, False, 1, 0, 0, released_at, holder)


@pytest.mark.parametrize(
    ("alpha", "utilities"), [(0, [0, 1, 0.444]), (0.5, [0.5, 1, 0.569]), (1, [1, 1, 0.694]), (2, [2, 1, 0.944])]
)
def test_marconi_s_utility(alpha: float, utilities: list[float]) -> None:
    """X saves 90 operations per byte and is 20 s old, Y 10 and 2 s, Z 30 and 4 s."""
    assert Marconi(alpha).utilities([90, 10, 30], [20, 2, 4]) == pytest.approx(utilities, abs=1e-3)


def test_marconi_keeps_long_prefixes() -> None:
    early, late = block(start=0, end=16), block(start=160, end=176)
    assert Marconi(1).keys([early, late], now=3.0) == [1, 2]
    assert Marconi(0).keys([early, late, block(released_at=1.0)], now=2.0) == [0, 0, 1]


def test_tlru_evicts_what_the_next_turn_may_recompute() -> None:
    """The next turn has 100 old and 10 new tokens and may compute 30: blocks that begin at 80 or later are safe to lose."""
    blocks = [block(start=start, end=start + 16, holder=100) for start in (64, 80, 96)]
    assert TLRU(threshold=30, next_prompt=10).keys(blocks, 0.0) == [True, False, False]
    assert TLRU(threshold=500, next_prompt=10).keys(blocks, 0.0) == [False] * 3


def soft_ttl() -> tuple[SoftTTL, PrefixPool]:
    """Six cached blocks in the order s1 s2 u1 u2 t1 t2: session S is alive until 9, that of T is over, u belong to none."""
    eviction = SoftTTL(ttl=5)
    pool = PrefixPool(6, 1, 2, 100, eviction)
    for number, (session, time) in enumerate((("S", 4.0), (None, 4.5), ("T", -1.0))):
        request = Request(number, 2, 9, session=session, last=False)
        names = [f"{session}2", f"{session}1"]  # the deeper one is released first
        pool.extend(0, 2)
        pool.register(0, names, 2)
        eviction.on_release(request, names, time)
        pool.release(0, None)
    pool.now = 5.0
    return eviction, pool


def evicted(pool: PrefixPool, number: int) -> list[str]:
    gone = []
    for _ in range(number):
        before = set(pool._blocks)
        pool.extend(1, 1)
        gone += [str(name) for name in before - set(pool._blocks)]
    return gone


def test_soft_ttl() -> None:
    eviction, pool = soft_ttl()
    assert evicted(pool, 5) == ["None1", "None2", "T1", "T2", "S1"]
    eviction, pool = soft_ttl()
    eviction.end("S")
    assert evicted(pool, 4) == ["S1", "S2", "None1", "None2"]


@pytest.mark.parametrize(
    ("first", "second", "classes"),
    [
        (False, True, [2, 2, 1, 2, 0]),
        (None, None, [2, 2, 0, 2, 2]),  # after the end of its time, a session of unknown length has ended
        (False, False, [2, 2, 1, 2, 2]),
        (False, None, [2, 2, 1, 2, 2]),
    ],
)
def test_a_session_ends_with_its_last_request(first: bool | None, second: bool | None, classes: list[int]) -> None:
    """Turns arrive after answers: released at 1, after its end at 1, at 6; the second turn runs, and has ended at 7."""
    eviction, seen = SoftTTL(ttl=5), list[int]()
    turns = [Request(number, 2, 9, session="S", last=last) for number, last in enumerate((first, second))]

    def look(now: float) -> None:
        seen.extend(eviction.keys([block("a")], now))

    eviction.on_release(turns[0], ["a"], 1.0)
    look(1.0)
    eviction.on_finish(turns[0])
    look(5.9)
    look(6.0)
    eviction.on_release(turns[1], ["a", "b"], 7.0)
    look(7.0)
    eviction.on_finish(turns[1])
    look(7.0)
    assert seen == classes
    assert not eviction.keys([block("c")], 7.0)[0]
    eviction.on_release(turns[0], ["a"], 8.0)
    assert eviction.keys([block("a")], 8.0) == [0 if second else 2], "an earlier turn ends after the last"


@pytest.mark.parametrize("make", [lambda: Marconi(-1), lambda: TLRU(-1, 0), lambda: SoftTTL(-1)])
def test_settings_out_of_range(make: type[Eviction]) -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        make()
