"""Whose pin goes when, and who takes its blocks: schedules by hand on the unit machine, an iteration a second, a token a block.

A prompt of P tokens and an output of O, admitted at t, holds P + k tokens after the iteration at t + k, and leaves P + O - 1 in the cache.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from test_session_policies import serve

from cbatch import Request
from experiments.workloads import Session, Turn
from policies.chunking import Fixed
from policies.continuum import Continuum
from policies.evictions import LRU
from policies.pauses import Pauses, TimeToLive


class Stated(TimeToLive):
    """Keeps a session for the seconds that its request states."""

    def after(self, request: Request) -> float:
        return float(request.extra.get("keep", 0.0))


class Noting(Fixed):
    def __init__(self) -> None:
        super().__init__(99)
        self.ended = list[Request]()

    def observe(self, request: Request) -> None:
        self.ended.append(request)


def turn(prompt: int, output: int = 1, keep: float = 0.0, at: float = 0.0) -> Turn:
    return Turn(prompt, output, pause=at, extra={"keep": keep})


def later(prompt: int, output: int = 1, pause: float = 1.0) -> Turn:
    """The second turn, with so many tokens beside the first one's prompt and answer."""
    return Turn(prompt, output, (0,), pause, 0)


def beside(name: str, prompt: int, at: float) -> Session:
    return Session(name, [turn(prompt, at=at)])


class Case(NamedTuple):
    """admitted: seconds of some turns, "A1" for the second turn of session A. settings: of `serve`."""

    sessions: list[Session]
    admitted: dict[str, float | None]
    memory: int
    settings: Mapping[str, Any] = {}


def coming_back(name: str, prompt: int, until: float, new: int, output: int = 1) -> Session:
    """Ends at 1 s, and comes back at 2 s."""
    return Session(name, [turn(prompt, keep=max(until - 1, 0)), later(new, output)])


def kept(name: str, prompt: int, keep: float) -> Session:
    """Is pinned for `keep` seconds from its end, and comes back when all is over."""
    return Session(name, [turn(prompt, keep=keep), later(1, pause=90)])


def pinned(until: float, prompt: int = 6) -> Session:
    """Ends at 1 s."""
    return kept("A", prompt, until - 1)


RUNNING = Session("R", [turn(2, 9)])
SHARING = [
    Session("A", [turn(1, keep=5), later(1, pause=90)], 4),
    Session("B", [turn(1, keep=5, at=2), later(1, pause=90)], 4),
]
CASES = {
    "the free blocks beside a pin suffice": Case([pinned(7), beside("X", 4, 5.5)], {"X0": 5.5}, 10),
    "the pin ends at its time": Case([pinned(7), beside("X", 5, 5.5)], {"X0": 7}, 10),
    "without pins all blocks suffice": Case([pinned(7), beside("X", 10, 5.5)], {"X0": 5.5}, 10, {"pins": False}),
    "5 tokens pin two blocks of two": Case([pinned(7, 5), beside("X", 6, 5.5)], {"X0": 5.5}, 10, {"block_size": 2}),
    "and no more": Case([pinned(7, 5), beside("X", 7, 5.5)], {"X0": 7}, 10, {"block_size": 2}),
    "pins of 5 and 5 tokens that share 4 hold 6": Case([*SHARING, beside("X", 4, 4)], {"X0": 4}, 10),
    "A's ends at 6, and B's still holds 5": Case([*SHARING, beside("X", 5, 4)], {"X0": 6}, 10),
    "the earliest end wakes the engine": Case([kept("A", 3, 8), kept("B", 3, 3), beside("X", 6, 3)], {"X0": 4}, 10),
    "the earliest pin comes first": Case(  # B's, at 2 s; A's is of 4 s, and Z takes the other place until 7 s
        [
            Session("A", [turn(1, 4, 20), later(1)]),
            Session("B", [turn(1, 2, 20), later(1, pause=3)]),
            Session("Z", [turn(1, 5, at=1.5)]),
        ],
        {"Z0": 2, "B1": 5, "A1": 6},
        99,
    ),
    "a decode takes a pin's blocks when no other is free": Case(  # before t, R holds 1 + t: none is left at 5 s
        [kept("A", 4, 50), RUNNING, beside("X", 3, 1.5)], {"X0": 5}, 10
    ),
    "those of the latest end": Case(  # A's 2 tokens at 5 s, B's 4 at 7 s
        [kept("A", 2, 30), kept("B", 4, 20), RUNNING, beside("X", 3, 1.5)], {"X0": 7}, 12, {"batch": 9}
    ),
    "of equal ends, those of the later pin": Case(
        [kept("Z", 4, 30), kept("A", 2, 30), RUNNING, beside("X", 3, 1.5)], {"X0": 7}, 12, {"batch": 9}
    ),
    "a pin whose time is not over is not taken": Case(  # A needs 8 blocks, of which B pins 4 until 9 s
        [coming_back("A", 3, 3, 4), kept("B", 4, 8)], {"A1": 9}, 10
    ),
    "nor one whose time is over, while others are admitted": Case(  # A, B, C need 6 each of 12 blocks from 6 s on, and pin 2
        [*(coming_back(name, 2, 2, 3) for name in "ABC"), Session("R", [turn(1, 6)])],
        {"A1": 6, "B1": 7, "C1": 7},
        12,
        {"batch": 9},
    ),
    "nor while the last iteration of others is in flight": Case(  # R's from 5 to 6 s; A needs all but B's 2, then B comes before E
        [coming_back("E", 2, 0, 4), coming_back("A", 2, 2, 7), coming_back("B", 2, 2, 3), Session("R", [turn(1, 6)])],
        {"A1": 6, "B1": 7, "E1": 8},
        12,
        {"batch": 9, "asynchronous": True},
    ),
    "the latest pin goes when nothing runs and all times are over": Case(  # 5 of 10 blocks each; both need 7
        [Session(name, [turn(2, 4, 0.25), later(1, pause=0.5)]) for name in "PQ"], {"P1": 4.5, "Q1": 5.5}, 10
    ),
    "nothing is left of a client that leaves the queue": Case(
        [pinned(7), beside("X", 5, 5.5)], {"X0": None}, 10, {"timeout": 1.25}
    ),
    "a branch that runs does not keep the pin": Case(  # of the branch that ended at 1 s; its time is over at 3 s
        [Session("J", [turn(4, keep=2), turn(1, 9), Turn(1, 1, (0, 1))]), beside("X", 6, 1.5)],
        {"X0": 3},
        12,
        {"batch": 9},
    ),
    "the next turn ends the pin": Case(  # Z's 5 tokens are cached beside
        [Session("Z", [turn(5)]), Session("A", [turn(3, keep=19), later(1, 6, 2)]), beside("X", 7, 3.5)], {"X0": 4}, 14
    ),
    "a turn whose pin was lost waits behind earlier sessions": Case(  # at 8 s, for R's last decode
        [Session("E", [turn(2), later(6, 2, 2)]), coming_back("A", 3, 51, 5, 2), RUNNING],
        {"E1": 9, "A1": 11},
        12,
        {"batch": 9},
    ),
    "a waiting turn keeps the pin beyond its time": Case(
        [coming_back("E", 2, 0, 6, 2), coming_back("A", 3, 4, 5, 2), Session("R", [turn(2, 6)])],
        {"A1": 6, "E1": 8},
        12,
        {"batch": 9},
    ),
    "a pin moves a branch that waits to the front": Case(
        [
            Session("E", [turn(1), Turn(9, 1, (0,), 0.5)]),
            Session("J", [turn(1, 4, 20), turn(9, at=1.5), Turn(1, 1, (0, 1))]),
            Session("R", [turn(2, 6)]),
        ],
        {"J1": 6, "E1": 7, "J2": 7},
        12,
        {"batch": 9},
    ),
    "the end of a session ends its pin": Case(
        [Session("J", [turn(4, keep=50), turn(1, 3)]), beside("X", 7, 1.5)], {"X0": 3}, 10
    ),
}


def test_without_pins_the_newest_request_is_preempted_and_comes_back() -> None:
    """12 blocks are full at 3 s, when both have three of six tokens."""
    jobs = [Session(name, [turn(4, 6)]) for name in "AB"]
    assert serve(Continuum(Fixed(99), Stated(Pauses())), jobs, memory=12, eviction=LRU()).ends == {"A": 6, "B": 9}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pinned_blocks(case: Case) -> None:
    policy = Continuum(noting := Noting(), Stated(Pauses()), case.settings.get("pins", True))
    how = {name: value for name, value in case.settings.items() if name != "pins"}
    requests = serve(policy, case.sessions, memory=case.memory, eviction=LRU(), **how).requests
    admitted = {f"{each.session}{each.turn}": each.admitted_at for each in requests}
    assert {name: admitted[name] for name in case.admitted} == case.admitted
    assert not (policy.pinned or policy.first or policy.waiting), "nothing is left of ended sessions"
    assert {*noting.ended} == {*requests}
