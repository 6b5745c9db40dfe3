"""Which block goes, on the worked examples of each rule's source; `tests/kv/test_prefix_pool.py` has those of recency and Belady."""

from itertools import product
from math import inf

import pytest

from cbatch import CachedBlock, ConfigError, Eviction, Request
from cbatch.kv import PrefixPool
from policies.evictions import TLRU, GivenUp, Marconi, SoftTTL
from policies.pauses import Pauses, TimeToLive


def block(name: str = "", start: int = 0, end: int = 1, holder: int = 0, released_at: float = 0.0) -> CachedBlock:
    return CachedBlock(name, start, end, False, 1, 0, 0, released_at, holder)


@pytest.mark.parametrize(
    ("alpha", "utilities"), [(0, [0, 1, 0.444]), (0.5, [0.5, 1, 0.569]), (1, [1, 1, 0.694]), (2, [2, 1, 0.944])]
)
def test_marconi_s_utility(alpha: float, utilities: list[float]) -> None:
    """X saves 90 operations per byte and is 20 s old, Y 10 and 2 s, Z 30 and 4 s."""
    assert Marconi(alpha).utilities([90, 10, 30], [20, 2, 4]) == pytest.approx(utilities, abs=1e-3)


def test_marconi_keeps_long_prefixes() -> None:
    """A layer takes 3 l + 2 l^2 operations for l tokens; of these, a block saves what its prefix takes beyond the block before."""
    blocks = [block(start=start, end=start + 16) for start in (0, 16, 160)]
    saved = [3 * 16 + 2 * (each.end**2 - each.start**2) for each in blocks]
    of_the_most = [(each - saved[0]) / (saved[-1] - saved[0]) for each in saved]
    assert Marconi(2).keys(blocks, now=3.0) == pytest.approx([2 * share + 1 for share in of_the_most])
    assert Marconi(0).keys([*blocks[::2], block(released_at=1.0)], now=2.0) == [0, 0, 1]


def test_tlru_evicts_what_the_next_turn_may_recompute() -> None:
    """Without a block, a turn computes the tokens held before it from the block's start on, and its own."""
    for held, new, threshold, start in product(range(0, 10, 3), range(3), range(12), range(10)):
        [kept] = TLRU(threshold, new).keys([block(start=start, end=start + 1, holder=held)], 0.0)
        assert kept == (held + new - start > threshold), (held, new, threshold, start)


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


def test_a_session_that_goes_on_delays_the_end_of_no_other() -> None:
    """S is released at 0, T at 1, S again at 4: of both it is unknown whether they go on; at 6 the time of T alone is over."""
    eviction = SoftTTL(ttl=5)
    for number, (session, now) in enumerate((("S", 0.0), ("T", 1.0), ("S", 4.0))):
        eviction.on_release(Request(number, 2, 9, session=session), [session], now)
    assert eviction.keys([block("S"), block("T")], 6.0) == [2, 0]


def test_the_time_to_live_follows_the_pauses_of_tools() -> None:
    """Two seconds while the tool is unknown; none once it has taken 9 s, from 5 to 14 s."""
    eviction = SoftTTL(TimeToLive(Pauses(), 2.0))
    first, second = (Request(id_, 2, 9, session="S", last=False, extra={"tool": "ls"}) for id_ in range(2))
    eviction.on_release(first, ["a"], 5.0)
    assert eviction.until == {"S": 7.0}
    eviction.on_admit(Request(1, 2, 9, session="S", arrival_time=14.0), ["a"], 15.0)
    eviction.on_release(second, ["a"], 20.0)
    assert eviction.until == {"S": 20.0} and SoftTTL(0).ttl == 0


@pytest.mark.parametrize("make", [lambda: Marconi(-1), lambda: Marconi(inf), lambda: TLRU(-1, 0), lambda: SoftTTL(-1)])
def test_settings_out_of_range(make: type[Eviction]) -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        make()


def test_what_was_given_up_goes_first_and_only_what_was_swapped_to_host_memory() -> None:
    """D was discarded, W swapped, L lives, and the last request of E has ended; [s] is the beginning of D, W and L."""
    eviction = GivenUp()
    pool = PrefixPool(9, 1, 4, 100, eviction, 9)
    for row, (session, texts) in enumerate({"L": ["s", "sl"], "W": ["s", "sw"], "D": ["s", "sd"], "E": ["e"]}.items()):
        found = pool.num_on_device(texts)
        pool.share(row, texts[:found])
        pool.extend(row, len(texts) - found)
        pool.register(row, texts, len(texts))
        request = Request(row, len(texts), 9, session=session, last=session == "E")
        eviction.on_release(request, texts, 0.0)
        pool.release(row, None)
        if request.last:
            eviction.on_finish(request)
    eviction.on_give_up("D", False)
    eviction.on_give_up("W", True)
    pool.extend(0, 4)  # blank ones
    assert evicted(pool, 5) == ["e", "sw", "sd", "sl", "s"], "given up are of a kind: the one released first"
    assert list(pool.host._slots) == ["sw", "sl", "s"]
