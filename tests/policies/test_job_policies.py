"""Which programs are admitted, which jobs come first, and which turns pass the queue, on worked examples of one second an iteration."""

from types import SimpleNamespace
from typing import Any

import pytest
from test_session_policies import late, serve
from unit_machine import running, view_of

from cbatch import Request
from experiments.workloads import Session, Turn
from policies.chunking import Fixed
from policies.evictions import LRU
from policies.justitia import Justitia
from policies.predictors import Predictor
from policies.program_admission import ProgramAdmission
from policies.session_affinity import SessionAffinity
from policies.shared.admission import Program, Thunder


def test_aimd_admits_one_more_program_after_a_good_period() -> None:
    """B waits for a second place, although A is in a pause from 1 to 5 s; it never comes with periods of 9 s."""
    jobs = [Session("A", [Turn(1, 1), Turn(1, 1, (0,), 4.0)]), Session("B", [Turn(1, 1)])]
    for period, ends in ((3.0, {"B": 4, "A": 6}), (9.0, {"A": 6, "B": 7})):
        assert serve(ProgramAdmission(Fixed(9), "aimd", period, least_found=0, width=1), jobs).ends == ends


@pytest.mark.parametrize(("limit", "least_found", "admitted"), [(0.5, 0.0, 6), (1.0, 0.0, 5), (1.0, 0.5, 5)])
def test_aimd_halves_the_programs_when_the_cache_is_full(limit: float, least_found: float, admitted: float) -> None:
    """At 3 s the two hold 16 of 20 tokens: B's next turn of 5 s waits until the period is over in which A is alone."""
    jobs = [Session(name, [Turn(6, 4), Turn(1, 2, (0,), 1.0)]) for name in "AB"]
    served = serve(ProgramAdmission(Fixed(20), "aimd", 3.0, limit, least_found, width=2), jobs, memory=20)
    assert [each.admitted_at for each in served.requests] == [0, 5, 0, admitted]


def test_aimd_halves_the_programs_when_turns_find_little() -> None:
    """The next turns at 2 s find nothing of their prompts without a prefix cache: from 3 s on A is alone until it ends at 5 s."""
    jobs = [Session(name, [Turn(1, 1), Turn(1, 1, (0,), 1.0), Turn(1, 1, (1,), 1.0)]) for name in "AB"]
    for least_found, end in ((0.5, 6), (0.0, 5)):
        served = serve(ProgramAdmission(Fixed(20), "aimd", 3.0, 1.0, least_found, width=2), jobs)
        assert served.ends == {"A": 5, "B": end}


def test_aimd_halves_the_programs_after_a_preemption() -> None:
    """12 blocks are full at 3 s: B is preempted, and serves its last three tokens when A has ended. The period until 4 s was congested."""
    policy = ProgramAdmission(Fixed(20), "aimd", 4.0, 1.0, 0.0, width=2)
    served = serve(policy, [Session(name, [Turn(4, 6)]) for name in "AB"], memory=12)
    assert (served.schedule, policy.programs.__dict__["width"]) == ("AB AB AB A A A B B B", 1)


def test_thunder_holds_programs_in_a_pause() -> None:
    """C and A fit into 10 tokens, B does not. A has 9 at 3 s, and pauses: held at 5 s, it counts 1.1 at 8 s, where B fits."""
    jobs = [Session("A", [Turn(6, 3), Turn(1, 1, (0,), 7.0)]), Session("B", [Turn(6, 1)]), Session("C", [Turn(2, 18)])]
    served = serve(ProgramAdmission(Fixed(20), "thunder", 5.0, 0.5), jobs, batch=3, memory=20)
    assert [each.admitted_at for each in served.requests] == [0, 10, 8, 0]


def test_thunder_holds_no_more_programs_than_the_excess_takes() -> None:
    """3 + 4 + 5 tokens of 10: without a, the smallest, 9 are left."""
    rule = Thunder(0.5)
    rule.active = {name: Program(name, place, 3 + place, 1) for place, name in enumerate("abc")}
    rule.decide(view_of(kv=SimpleNamespace(num_tokens=20), now=5.0), 1.0, False)
    assert ([*rule.active], [*rule.held]) == (["b", "c"], ["a"])


def test_justitia_serves_jobs_in_the_order_of_a_fluid_system() -> None:
    """An iteration offers 10. X ends at 20 in virtual time; Y, from 10 on, at 14; Z, from 16 on, at 18; W comes when X has ended."""
    jobs = [
        Session(name, [Turn(1, 1, pause=time, extra={"job_cost": cost}), *rest])
        for name, time, cost, rest in (
            ("X", 0.0, 20, [Turn(1, 1, (0,)), Turn(1, 1, (1,))]),
            ("Y", 1.0, 4, []),
            ("Z", 2.0, 2, []),
            ("W", 3.0, 5, []),
        )
    ]
    policy = Justitia(Fixed(9), Predictor())
    assert serve(policy, jobs, batch=1, memory=10).schedule == "X Y Z X X W"
    assert policy.tags == {}


def test_justitia_tags_a_job_at_its_first_request_and_learns_from_each() -> None:
    """X's other branch comes at 1 s and states another cost, which does not count; Y's tag, from 20 on, is 32."""

    class Noting(Predictor):
        def observe(self, request: Request) -> None:
            seen.append(request)

    seen = list[Request]()
    branches = [Turn(1, 3, extra={"job_cost": 20}), Turn(1, 1, pause=1.0, extra={"job_cost": 50})]
    jobs = [Session("X", branches), Session("Y", [Turn(1, 1, pause=1.5, extra={"job_cost": 12})])]
    served = serve(Justitia(Fixed(9), Noting()), jobs, batch=1, memory=10)
    assert served.schedule == "X X X X Y" and {*seen} == {*served.requests}


def test_justitia_expects_of_a_job_the_mean_of_those_before() -> None:
    """1 and 3 prompt tokens, 1 and 2 output tokens: 1 + 0.5 + 6 + 2."""
    policy, request = Justitia(Fixed(9), Predictor()), Request(9, 4, 2)
    assert policy._cost(request) == 4 * 2 + 2
    serve(policy, [Session("A", [Turn(1, 1), Turn(3, 2, (0,))])])
    assert policy._cost(request) == 9.5


@pytest.mark.parametrize(
    ("settings", "schedule"),
    [
        ({}, "SXXXXSY"),
        ({"patience": 3.0}, "SXXXXYS"),  # Y has waited for 3 s at 5 s
        ({"window": 1}, "SXXXXYS"),
        ({"ttl": 3.9}, "SXXXXYS"),  # S's turn ended at 1 s
        ({"ttl": 4.0}, "SXXXXSY"),
        ({"least_blocks": 4}, "SXXXXSY"),
        ({"least_blocks": 5}, "SXXXXYS"),
    ],
)
def test_one_turn_that_finds_its_session_passes_the_queue(settings: dict[str, Any], schedule: str) -> None:
    """S's second turn comes at 2.5 s, half a second after Y, and finds 4 of its 6 tokens."""
    jobs = [Session("S", [Turn(4, 1), Turn(1, 1, (0,), 1.5, 0)]), late("X", 0.5, 4), late("Y", 2.0, 1)]
    served = serve(SessionAffinity(20, **settings), jobs, batch=1, places=1, eviction=LRU())
    assert served.schedule.replace(" ", "") == schedule


def test_no_turn_passes_a_preempted_request() -> None:
    policy, waiting = SessionAffinity(20), [running(0, 4, 1), running(1, 4, 1, session="S")]
    policy._ended["S"] = 1.0
    view = view_of(waiting=waiting, now=2.0, kv=SimpleNamespace(block_size=1))
    assert [*policy.waiting(view)] == waiting[::-1]
    policy._victims = waiting[:1]
    assert [*policy.waiting(view)] == waiting
