"""Routers that look at loads and sessions alone: one choice of each by hand."""

from typing import Any

import pytest
from shown_replicas import ASKED, Shown, loads, prompt, replica

from cbatch.cluster import LeastLoaded
from policies.routers import ROUTERS, BoundedLoads, PowerOfTwo, SessionHash
from policies.shared.hash_ring import HashRing, position_of, ring_of


def test_the_shortest_queue_is_joined() -> None:
    assert LeastLoaded().choose(ASKED, loads(3, 1, 1)) == 1
    view: Any = Shown(
        [replica(num_unfinished=1, outstanding_tokens=50), replica(num_unfinished=3, outstanding_tokens=9)]
    )
    assert [LeastLoaded(tokens).choose(ASKED, view) for tokens in (False, True)] == [0, 1]


@pytest.mark.parametrize(("drawn", "chosen"), [([0, 2], 2), ([2, 1], 2), ([1, 0], 1)])
def test_the_less_loaded_of_two_is_taken(drawn: list[int], chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties: the first drawn."""
    router = PowerOfTwo()
    monkeypatch.setattr(
        router._random, "sample", lambda able, number: drawn if (able, number) == ([0, 1, 2], 2) else []
    )
    assert router.choose(ASKED, loads(3, 1, 1)) == chosen


def test_two_choices_of_one_replica_are_that_one() -> None:
    assert PowerOfTwo().choose(ASKED, loads(7)) == 0


@pytest.mark.parametrize(("factor", "chosen"), [(1.25, "ababacb"), (1e9, "aaaaaca"), (1.0, "abcabca")])
def test_loads_on_a_ring_are_bounded(factor: float, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points a 10, b 40, c 70; nothing ends. At 1.25 the bounds are 1 1 2 2 3 3 3; at 1 they are 1 1 1 2 2 2 3."""
    ring, sent = HashRing([(10, 0), (40, 1), (70, 2)]), [0, 0, 0]
    monkeypatch.setattr("policies.routers.bounded_loads.ring_of", lambda number: ring)
    monkeypatch.setattr("policies.routers.bounded_loads.position_of", int)
    router, text = BoundedLoads(factor), ""
    for key in (5, 6, 7, 8, 9, 45, 5):
        index = router.choose(prompt("a", session=str(key)), loads(*sent))
        sent[index] += 1
        text += "abc"[index]
    assert text == chosen


def test_a_key_on_a_point_is_the_points() -> None:
    ring = HashRing([(10, 0), (40, 1)])
    assert [next(ring.clockwise(key)) for key in (0, 10, 11, 40, 41)] == [0, 0, 1, 1, 0]


def test_few_sessions_move_when_a_replica_comes() -> None:
    """A fifth of the sessions go to the new one of five replicas, and none elsewhere."""
    owners = [[next(ring_of(number).clockwise(key << 50)) for key in range(16_000)] for number in (4, 5)]
    moved = [new for old, new in zip(*owners, strict=True) if old != new]
    assert {*moved} == {4} and 0.15 < len(moved) / 16_000 < 0.25
    assert all(0.2 < owners[0].count(index) / 16_000 < 0.3 for index in range(4))


def test_a_session_stays_and_others_go_where_fewest_were_sent() -> None:
    """Four requests at 10 s, then eight without a session to the other two replicas; the former are forgotten at 70 s."""
    router, view = SessionHash(), loads(0, 0, 0)
    view.now = 10.0
    home = router.choose(prompt("a", session="s"), view)
    assert [router.choose(prompt("a", session="s"), view) for _ in range(3)] == [home] * 3
    view.now = 12.0
    others = [index for index in range(3) if index != home]
    assert sorted(router.choose(prompt("a"), view) for _ in range(8)) == sorted(others * 4)
    router.choose(prompt("a", session="s"), view)
    view.now = 69.9
    assert router.choose(prompt("a"), view) == others[0], "4 each, and 5 at home"
    view.now = 70.0
    assert router.choose(prompt("a"), view) == home, "1 there"


def test_replicas_on_the_ring_are_the_same_in_every_process() -> None:
    keys = [f"session {number}" for number in range(24)]
    assert "".join(f"{next(ring_of(4).clockwise(position_of(key)))}" for key in keys) == "012010030310102303322102"
    router, view = BoundedLoads(1e9), loads(0, 0, 0, 0)
    chosen = [router.choose(prompt("a", session=key, client="c"), view) for key in keys]
    assert chosen == [router.choose(prompt("a", client=key), view) for key in keys]
    assert [router.choose(prompt("a", id_), view) for id_ in range(9)] == [
        router.choose(prompt("a", client=str(id_)), view) for id_ in range(9)
    ]


def test_what_routers_depend_on() -> None:
    needs = {name: getattr(router, "depends_on", ()) for name, router in ROUTERS.items()}
    caches, sessions = (
        (
            "cache_aware",
            "prefix_aware",
            "preble",
            "kv_aware",
            "load_aware",
            "dynamo",
            "llm_d",
            "lmetric",
            "shortest_ttft",
        ),
        ("bounded_loads", "session_hash"),
    )
    assert {name for name, of in needs.items() if of} == {*caches, *sessions}
    assert {needs[name] for name in caches} == {("prefix_cache",)} and {needs[name] for name in sessions} == {
        ("sessions",)
    }
