"""Policies that schedule by session, on worked examples: the unit machine serves sessions in closed loop, whose turns follow ends."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import pytest
from schedules import Wrapped
from test_sessions import SECOND, Scripted

from cbatch import Eviction, KVSize, Limits, Plan, Policy, Request, Server, View
from cbatch.sim import SimExecutor
from experiments.workloads import Session, Turn
from policies.chunking import Fixed
from policies.plas import Atlas, Plas
from policies.sarathi_serve import SarathiServe


class _Written(Wrapped):
    """Any policy, with the sessions of each of its plans, by name."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.entries = list[str]()

    def plan(self, view: View) -> Plan:
        plan = self.policy.plan(view)
        if len(plan):
            self.entries.append("".join(sorted(request.session or "-" for request in plan.requests)))
        return plan


class Served(NamedTuple):
    """schedule: the sessions of each iteration. ends: seconds, by session. requests: in order of their numbers."""

    schedule: str
    ends: dict[str, float]
    requests: list[Request]


def serve(
    policy: Policy,
    sessions: Sequence[Session],
    *,
    batch: int = 2,
    places: int = 100,
    tokens: int = 100,
    memory: int = 1000,
    eviction: Eviction | None = None,
) -> Served:
    """Serves sessions that begin at once, an iteration a second. memory: tokens of KV cache, in blocks of one."""
    server = Server(
        SimExecutor(SECOND),
        Limits(batch, tokens, memory, tile=1, max_running=places),
        SECOND,
        KVSize(memory, 1),
        False,
        prefix_cache=eviction,
    )
    written = _Written(policy)
    record = server.engine(written, Scripted(given=sessions, sessions=len(sessions)).source(None)).run()
    requests = sorted(record.requests, key=lambda each: each.id)
    ends = {
        each.session or "": each.finished_at or 0.0
        for each in sorted(requests, key=lambda each: each.finished_at or 0.0)
    }
    return Served(" ".join(written.entries), ends, requests)


def calls(name: str, *lengths: int) -> Session:
    """Calls one after another, each of this many iterations."""
    return Session(name, [Turn(1, length, (place - 1,) if place else ()) for place, length in enumerate(lengths)])


def late(name: str, time: float, length: int) -> Session:
    """A single call that arrives at `time` seconds."""
    return Session(name, [Turn(1, length, pause=time)])


FIGURE = [calls("A", 4, 3, 1, 1), calls("B", 3, 3, 4), calls("C", 1, 2), calls("D", 4)]
"""Figure 2 of Autellix."""


@pytest.mark.parametrize(
    ("policy", "schedule", "ends"),
    [
        (SarathiServe(Fixed(9)), "AB AB AB AC BD BD BD AD AC AC AB AB B B", {"D": 8, "C": 10, "A": 12, "B": 14}),
        (Plas(Fixed(9), [2, 3]), "AB AB CD CD AC BD AD AB AB AB AB AB B B", {"C": 5, "D": 7, "A": 12, "B": 14}),
    ],
)
def test_programs_wait_as_in_autellix_s_figure(policy: Policy, schedule: str, ends: dict[str, float]) -> None:
    """The sums of their waiting times are 18 and 12 s, as printed."""
    served = serve(policy, FIGURE)
    assert (served.schedule, served.ends) == (schedule, ends)


@pytest.mark.parametrize(("kind", "schedule"), [(Plas, "S" * 9 + "RRS"), (Atlas, "S" * 10 + "RR")])
def test_atlas_counts_the_longest_chain_before_a_join(kind: type[Plas], schedule: str) -> None:
    """Calls of 2 s, then of 5 and 1 s, are followed by a join: 8 s of service, at most 7 of them in a chain. R comes in its first second."""
    fork = [Turn(1, 2), Turn(1, 5, (0,)), Turn(1, 1, (0,)), Turn(1, 2, (1, 2))]
    served = serve(kind(Fixed(9), [8]), [Session("S", fork), late("R", 8.5, 2)], batch=1)
    assert served.schedule.replace(" ", "") == schedule


@pytest.mark.parametrize(("beta", "schedule"), [(2.0, "ARSTAUVWA"), (inf, "ARSTUVWAA")])
def test_a_program_that_waits_long_is_served(beta: float, schedule: str) -> None:
    """A new call of a second comes each second. A has waited 2 s and was served for 1 s at 3 s, and since then at 6 s."""
    rivals = [late(name, number, 1) for number, name in enumerate("RSTUVW", 1)]
    served = serve(Plas(Fixed(9), [1], beta), [calls("A", 3), *rivals], batch=1)
    assert served.schedule.replace(" ", "") == schedule


def test_a_full_cache_preempts_the_call_behind() -> None:
    """A, of the second queue since 2 s, holds 2 of 4 tokens of the KV cache when B comes with 3: A is preempted, and recomputes 3."""
    served = serve(Plas(Fixed(9), [2]), [calls("A", 3), Session("B", [Turn(3, 1, pause=2.0)])], batch=1, memory=4)
    assert (served.schedule, [each.num_recomputed_tokens for each in served.requests]) == ("A A B A", [2, 0])
