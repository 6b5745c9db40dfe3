"""Policies that schedule by session, on worked examples: the unit machine serves sessions in closed loop, whose turns follow ends."""

from collections.abc import Sequence
from math import inf
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from every_policy import EVERY_POLICY
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import Wrapped
from test_sessions import SECOND, Scripted, scripts
from unit_machine import view_of

from cbatch import (
    ConfigError,
    CostFunction,
    Eviction,
    FinishReason,
    KVSize,
    Limits,
    Plan,
    Policy,
    Request,
    Server,
    View,
)
from cbatch.sim import SimExecutor
from experiments.workloads import Session, Turn
from experiments.workloads.scripts import prompts_of
from policies.chunking import Fixed
from policies.continuum import Continuum
from policies.evictions import LRU, GivenUp, SoftTTL
from policies.infercept import InferCept
from policies.pauses import Pauses, TimeToLive, best_time
from policies.plas import Atlas, Plas
from policies.program_admission import ProgramAdmission
from policies.sarathi_serve import SarathiServe
from policies.shared.pins import Pin
from policies.shared.waste import waste_of_computing, wastes


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
    on_host: int = 0,
    eviction: Eviction | None = None,
    asynchronous: bool = False,
    block_size: int = 1,
    cost: CostFunction = SECOND,
    timeout: float | None = None,
) -> Served:
    """Serves sessions that begin at once, an iteration a second. memory: tokens of KV cache."""
    server = Server(
        SimExecutor(SECOND),
        Limits(batch, tokens, memory + 1, tile=1, max_running=places),
        cost,
        KVSize(memory // block_size, block_size, on_host),
        asynchronous,
        prefix_cache=eviction,
    )
    written = _Written(policy)
    record = server.engine(
        written, Scripted(given=sessions, sessions=len(sessions), timeout=timeout).source(None)
    ).run()
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
    if isinstance(policy, Plas):
        assert [*policy._queues._programs] == ["B"], "the last end is noted by the next plan"


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


# -- Continuum --------------------------------------------------------------------------------------------------------


def known() -> TimeToLive:
    """ls takes 0.5 s, pytest 10."""
    pauses = Pauses()
    pauses.add("ls", 0.5)
    pauses.add("pytest", 10.0)
    return TimeToLive(pauses)


def two_jobs(tool: str, pause: float) -> list[Session]:
    """J1's first turn ends at 5 s, when the KV cache holds 6 of 10 tokens; its second has 9. J2 comes at 4 s with 8."""
    first = Session("J1", [Turn(2, 5, extra={"tool": tool}), Turn(2, 1, (0,), pause, 0)])
    return [first, Session("J2", [Turn(8, 1, pause=4.0)])]


@pytest.mark.parametrize(
    ("tool", "pause", "pins", "admitted", "hits"),
    [
        ("ls", 1.0, True, (6, 7), 6),  # the second turn comes within 2 s, and before J2
        ("ls", 9.0, True, (14, 7), 2),  # it does not: four of J1's blocks are evicted for J2
        ("pytest", 1.0, True, (6, 5), 2),  # takes too long to wait for
        ("write", 1.0, True, (6, 7), 6),  # unknown tools are waited for
        ("ls", 1.0, False, (6, 5), 2),  # without pins only the order is Continuum's
    ],
)
def test_continuum_waits_for_short_tools(
    tool: str, pause: float, pins: bool, admitted: tuple[float, float], hits: int
) -> None:
    policy = Continuum(Fixed(20), known(), pins)
    _, second, other = serve(policy, two_jobs(tool, pause), memory=10, eviction=SoftTTL(known())).requests
    assert ((second.admitted_at, other.admitted_at), second.num_cached_tokens) == (admitted, hits)


@pytest.mark.parametrize("eviction", [LRU(), SoftTTL(known())])
def test_a_tool_that_never_ends_blocks_no_other(eviction: Eviction) -> None:
    """The client of J1 does not come back: its pin ends by time, without an event at the engine."""
    served = serve(Continuum(Fixed(20), known()), two_jobs("ls", 1e6), memory=10, eviction=eviction)
    assert served.requests[2].admitted_at == 7.0


def test_the_time_to_live_is_the_best_of_the_observed_pauses() -> None:
    """A miss costs 3 and a second of half the cache 0.5: gains of 1, 1.25 and -1 for 1, 2 and 8 s. At a worth of 1 no time pays."""
    assert best_time([1, 2, 8, 1], 3 / 0.5) == 2
    assert best_time([1, 2, 8, 1], 1.0) == 0
    pauses = Pauses(least=2)
    for tool, seconds in (("a", 4.0), ("b", 1.0), ("b", 1.0)):
        pauses.add(tool, seconds)
    of_tool, of_all = (Request(0, 1, 1, session="s", extra={"tool": tool}) for tool in "ba")
    assert [TimeToLive(pauses, worth=20.0).after(each) for each in (of_tool, of_all)] == [1.0, 4.0], "a was seen once"
    assert (pauses.mean(of_tool), pauses.mean(of_all), Pauses().mean(of_all)) == (1.0, 2.0, None)
    assert TimeToLive(Pauses(), 3.0, worth=20.0).after(of_all) == 3.0
    assert [TimeToLive(pauses).after(each) for each in (of_tool, of_all, Request(0, 1, 1))] == [2.0, 0.0, 0.0]


@pytest.mark.parametrize("pause", [None, 3.0])
def test_pauses_are_learned_from_the_next_turn(pause: float | None) -> None:
    """A turn's pause counts for the tool that the turn before called: the stated pause, or the seconds since that turn ended. First turns teach nothing."""
    pauses = Pauses()
    first = Request(0, 1, 1, session="s", extra={"tool": "ls"}, last=False, pause=0.0)
    second = Request(1, 1, 1, session="s", arrival_time=7.5, last=True, pause=pause)
    for request, end in ((first, 5.0), (second, 9.0)):
        pauses.note_arrival(request)
        pauses.note_end(request, end)
    assert [*pauses.of_tool(first)] == [2.5 if pause is None else pause] and not pauses.of_tool(second)


# -- InferCept --------------------------------------------------------------------------------------------------------


def test_the_wastes_are_those_of_infercept_s_code_and_paper() -> None:
    """960 tokens beside 84 decodes of 8,000 tokens take chunks of 300: 47.0 + 200.9 + 13.5 token-seconds."""
    discard = waste_of_computing(960, 384, 84, 8000, 0.0154, 2.79e-5)
    assert discard == pytest.approx(261.4, abs=0.05)
    assert 0.2 * 960 < discard < 0.3 * 960
    assert wastes(100, 300, 0.5, 0.1) == {"discard": 200, "preserve": 10}
    of_three = [wastes(100, 300, 0.5, 3, transfer) for transfer in (0.1, 0.4, 0.6)]
    assert [min(each, key=each.__getitem__) for each in of_three] == ["swap", "swap", "discard"]
    assert [each["swap"] for each in of_three] == [40, 160, 240] and of_three[0]["preserve"] == 300


@pytest.mark.parametrize(
    ("paper", "mean", "pause", "swap", "admitted", "hits"),
    [
        (False, 0.5, 0.25, None, (5.25, 6.25), (6, 0)),  # preserve wastes 3 token-seconds, discard 3.6
        (False, 0.5, 9.0, None, (14, 5.6), (2, 0)),  # the pause is longer, and wastes 3.6 of them at 5.6 s
        (False, 3.0, 0.25, None, (6, 5), (2, 0)),  # preserve wastes 18
        (True, 0.5, 9.0, None, (14, 6), (2, 0)),  # discard wastes a second of 6 tokens
        (False, 0.5, 0.25, 0.045, (5.25, 6.25), (6, 0)),  # swap wastes 2 * 0.27 * 6 = 3.24, preserve 3
        (False, 0.5, 0.25, 0.01, (6, 5), (6, 4)),  # swap wastes 0.72; J2's 8 tokens take 4 of the 6 blocks
        (False, 3.0, 0.25, 0.06, (6, 5), (2, 0)),  # swap wastes 4.32, discard 3.6, and is not for the host
        (True, 0.5, 9.0, 0.01, (14, 5), (6, 4)),
    ],
)
def test_infercept_keeps_what_wastes_less(
    paper: bool, mean: float, pause: float, swap: float | None, admitted: tuple[float, float], hits: tuple[int, int]
) -> None:
    """A token takes 0.1 s: computing 6 again wastes 0.1 * 6 * 6. hits: all, and in host memory.

    swap: seconds to copy a block out or back; 6 out and back waste 2 * 6 * 6 times that.
    """
    jobs, pauses = two_jobs("ls", pause), Pauses()
    pauses.add("ls", mean)
    policy = InferCept(Fixed(20), pauses, 384, 0.0, 0.1, paper, swap is not None)
    cost = CostFunction(SECOND.predict, lambda num_out, num_back, size: (swap or 0.0) * (num_out + num_back))
    _, second, other = serve(policy, jobs, memory=10, eviction=GivenUp(), on_host=100, cost=cost).requests
    assert (second.admitted_at, other.admitted_at) == pytest.approx(admitted)
    assert (second.num_cached_tokens, second.num_host_tokens) == hits


@pytest.mark.parametrize(
    ("mean", "passed", "until"),
    [
        (5.0, 3.0, inf),  # 2 s are left: 18 token-seconds
        (4.9, 3.0, 4.9),  # 1.9 s are left: 17.1
        (None, 3.0, inf),  # as long again as the pause has lasted: 27
        (None, 1.9, 17.7 / 9),
    ],
)
def test_infercept_compares_the_rest_of_a_pause_with_computing_again(
    mean: float | None, passed: float, until: float
) -> None:
    """9 tokens beside 2 decodes of 10 take chunks of 6 and 3: (0.5 + 0.1 * 8) * 6 + 0.1 * (6 * 10 + 3 * (10 + 3)) = 17.7 token-seconds."""
    policy = InferCept(Fixed(20), Pauses(), budget=8, seconds=0.5, per_token=0.1)
    policy.pinned["s"] = Pin(1, num_tokens=9, since=100.0, until=100.0, pause=mean)
    decodes = [SimpleNamespace(num_computed=computed) for computed in (4, 6)]
    kv = SimpleNamespace(block_size=1, blocks_for=lambda tokens: tokens)
    policy.lapse(SimpleNamespace(now=100.0 + passed, running=decodes, decoding=decodes, kv=kv, cost=SECOND))  # type: ignore[arg-type]
    assert policy.pinned["s"].until == pytest.approx(100.0 + until), "infinite: the first to go when blocks run short"


@pytest.mark.parametrize("arguments", [{"budget": 0}, {"seconds": -0.1}, {"per_token": -0.1}])
def test_infercept_refuses_iterations_that_cannot_be(arguments: Any) -> None:
    with pytest.raises(ConfigError, match="policy: need budget="):
        InferCept(Fixed(20), Pauses(), **arguments)


# -- any sessions -----------------------------------------------------------------------------------------------------

BY_SESSION = ["plas", "atlas", "continuum", "infercept", "infercept_paper"]
BY_SESSION += ["aimd", "thunder", "justitia", "session_affinity"]


@pytest.mark.long
@pytest.mark.parametrize("name", BY_SESSION)
def test_all_turns_of_any_sessions_are_served(name: str, num_sessions: int) -> None:
    """By a cache that holds little more than the longest turn, whatever is pinned, held back, preempted or paused."""
    several = st.lists(scripts(), min_size=1, max_size=5, unique_by=lambda session: session.name)
    inputs = (st.just(name), several, st.integers(0, 6), st.sampled_from([3, 100]), st.booleans())
    settings(max_examples=num_sessions)(given(*inputs)(_check_served))()


def _check_served(name: str, sessions: list[Session], spare: int, places: int, asynchronous: bool) -> None:
    turns = [turn for session in sessions for turn in zip(prompts_of(session, 0), session.turns, strict=True)]
    memory, eviction = (
        max(said.num_tokens + turn.output for said, turn in turns) + spare,
        SoftTTL(TimeToLive(Pauses(), worth=9.0)),
    )
    how = {"batch": 3, "places": places, "memory": memory, "eviction": eviction, "asynchronous": asynchronous}
    served = serve(EVERY_POLICY[name](3), sessions, **how)  # type: ignore[arg-type]
    assert [each.finish_reason for each in served.requests] == [FinishReason.LENGTH] * len(turns)


def test_a_request_that_vllm_has_admitted_by_itself_holds_up_no_other() -> None:
    policy, requests = ProgramAdmission(Fixed(8)), [Request(0, 1, 9), Request(1, 4, 1)]
    for request in requests:
        policy.on_arrival(request)
        policy.on_wait(request)
    policy.programs.fill(view := view_of(prefilling=[], is_waiting=requests[1:].__contains__))
    assert list(policy.prompts(view)) == requests[1:]
