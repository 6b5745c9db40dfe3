"""The properties that papers claim for their policies, and policies that lack what every policy needs."""

import random
import re
from collections.abc import Callable
from functools import cache
from itertools import islice

import pytest

from cbatch import ConfigError, Plan, Policy, View
from cbatch.stall import Patience
from experiments.check.__main__ import _policy
from experiments.check.properties import PROPERTIES
from experiments.check.scenario import Arrival, Ending, Scenario, play
from experiments.check.search import Verdicts, search, tight_scenarios, tiny_scenarios
from experiments.settings.compose import policy_names
from policies.chunking import Fixed, PDAware, TileAligned
from policies.evictions import LRU
from policies.longest_first import LongestFirst
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

CHUNK = 4
BY_NAME = {prop.name: prop for prop in PROPERTIES}
NEEDED = [prop for prop in PROPERTIES if prop.needed]


@cache
def all_scenarios(chunk: int) -> list[Scenario]:
    return list(tiny_scenarios(chunk))


@cache
def few_scenarios(chunk: int) -> list[Scenario]:
    """Some of the tiny scenarios, synchronous and asynchronous, and more of those with more than three requests."""
    numbered = enumerate(all_scenarios(chunk))
    return [scenario for number, scenario in numbered if number % (4 if len(scenario.arrivals) > 3 else 160) == 0]


def lacking(verdicts: Verdicts) -> set[str]:
    return {name for name, counterexample in verdicts.items() if counterexample is not None}


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (RequestLevel(), {"iteration_level", "stall_free", "bounded_tbt"}),
        (Orca(), {"bounded_tbt"}),
        (PrefillFirst(), {"stall_free", "bounded_tbt"}),
        (Sarathi(Fixed(CHUNK)), set()),
        (Sarathi(PDAware()), {"bounded_tbt"}),  # chooses its own chunk
        (SarathiServe(TileAligned(CHUNK)), set()),
        (LongestFirst(TileAligned(CHUNK)), {"fair"}),  # as its docstring says
    ],
    ids=lambda value: type(value).__name__,
)
def test_policies_have_the_properties_that_their_papers_claim(policy: Policy, expected: set[str]) -> None:
    assert lacking(search(policy, PROPERTIES, CHUNK, num_random=10, tiny=few_scenarios(CHUNK))) == expected


@pytest.mark.parametrize("name", policy_names())
def test_every_built_in_policy_has_the_properties_that_every_policy_needs(name: str) -> None:
    build, chunk, *_ = _policy([f"policy={name}"])
    few = [*all_scenarios(chunk)[::3000], *islice(tight_scenarios(chunk), 0, None, 3)]
    assert lacking(search(build(), NEEDED, chunk, num_random=0, tiny=few)) == set()


@pytest.mark.parametrize(
    ("name", "scenario"),
    [  # a prompt begun while another was not admitted; a prompt preempted for a decode that came back first
        ("qoserve", Scenario((Arrival(15, 1, 0), Arrival(9, 1, 1)), 2, 16, 2, 8, False)),
        ("slai", Scenario((Arrival(1, 3, 0), Arrival(9, 1, 2)), 2, 10, 6, 2, True)),
    ],
)
def test_schedules_that_once_had_no_end(name: str, scenario: Scenario) -> None:
    assert play(_policy([f"policy={name}"])[0], scenario).ending is Ending.COMPLETE


class Planned(Orca):
    """Plans by a function of the view and of Orca's plan."""

    def __init__(self, change: Callable[[View, Plan], Plan]) -> None:
        self.change = change

    def plan(self, view: View) -> Plan:
        return self.change(view, super().plan(view))


def preempt_all(view: View, plan: Plan) -> Plan:
    builder = view.plan()
    for request in list(view.running):
        builder.preempt(request)
    for request in view.waiting:
        builder.add(request, 1)
    return builder.build()


def take_all(view: View, plan: Plan) -> Plan:
    """Takes whatever is ready, whether or not it fits."""
    return Plan((request, request.num_ready) for request in [*view.running, *view.waiting][: view.limits.max_batch])


def forget_decodes(view: View, plan: Plan) -> Plan:
    return Plan((request, request.num_ready) for request in list(view.waiting)[: view.limits.max_batch])


def note_iteration(view: View, plan: Plan) -> Plan:
    plan.note = f"iteration {view.iteration}"
    return plan


def reserve_in_turn(view: View, plan: Plan) -> Plan:
    plan.reserve = dict.fromkeys(plan.requests, 4 + view.iteration % 2)
    return plan


def admit_at_even_iterations(view: View, plan: Plan) -> Plan:
    return Plan((request, 1) for request in view.decoding) if view.running and view.iteration % 2 else plan


def hesitate(view: View, plan: Plan) -> Plan:
    return Plan(wake_at=view.now + 1) if round(view.now) % 2 == 0 and not view.num_in_flight else plan


def test_first_come_first_served_by_arrival_time_is_fair() -> None:
    """The last id is first among those that came together: with one arrival time for all, requests would starve."""

    class ByTime(Orca):
        def plan(self, view: View) -> Plan:
            plan = view.plan()
            for request in [*view.running, *sorted(view.waiting, key=lambda of: (of.arrival_time, -of.id))]:
                plan.add(request, request.num_ready)
            return plan.build()

    streams = [scenario for scenario in all_scenarios(CHUNK) if len(scenario.arrivals) > 9]
    assert lacking(search(ByTime(), [BY_NAME["fair"]], CHUNK, num_random=0, tiny=streams)) == set()


@pytest.mark.parametrize(
    ("name", "eviction", "why"),
    [
        ("prefix_order", LRU(), "request 2 waits while 9 that came after it are admitted"),
        ("prefix_order", None, None),  # nothing is cached: first come, first served
        ("sarathi_serve", LRU(), None),
    ],
)
def test_a_request_without_a_cached_prefix_starves_behind_later_ones_that_have_one(
    name: str, eviction: LRU | None, why: str | None
) -> None:
    streams = [scenario for scenario in all_scenarios(CHUNK) if len(scenario.arrivals) > 9]
    how = {"num_random": 0, "tiny": streams, "eviction": eviction}
    counterexample = search(_policy([f"policy={name}"])[0](), [BY_NAME["fair"]], CHUNK, **how)["fair"]  # type: ignore[arg-type]
    assert (counterexample and counterexample.violation.why) == why


@pytest.mark.parametrize(
    ("plan", "name", "why", "num_requests"),
    [
        (lambda view, plan: Plan([*plan, *plan]), "legal", "rule: a request is named once in a plan", 1),
        (lambda view, plan: plan if len(plan) < 2 else {}["nothing"], "legal", "plan() raised KeyError: 'nothing'", 2),
        (take_all, "kv", "rule: the KV blocks that a plan takes must be free", 2),
        (preempt_all, "ends", "requests are planned and preempted again and again, and none ends", 1),
        (lambda view, plan: Plan(wake_at=view.now + 1), "ends", "50 empty plans in a row with 1 waiting", 1),
        (forget_decodes, "ends", "iteration 1: empty plan with 0 waiting and 1 running", 1),
        (hesitate, "work_conserving", "nothing is computed, although any waiting request would fit", 1),
        (admit_at_even_iterations, "steady", "although nothing has changed", 2),
    ],
)
def test_the_smallest_schedule_that_violates_a_property_is_found(
    plan: Callable[[View, Plan], Plan], name: str, why: str, num_requests: int
) -> None:
    counterexample = search(Planned(plan), [BY_NAME[name]], CHUNK, num_random=0)[name]
    assert counterexample is not None
    assert why in counterexample.violation.why
    assert len(counterexample.history.scenario.arrivals) == num_requests


def test_a_policy_that_draws_without_a_seed_is_not_deterministic() -> None:
    policy = Planned(lambda view, plan: Plan(random.sample(list(plan), len(plan))))
    three = [scenario for scenario in all_scenarios(CHUNK) if len(scenario.arrivals) == 3][::25]
    counterexample = search(policy, [BY_NAME["deterministic"]], CHUNK, num_random=0, tiny=three)["deterministic"]
    assert counterexample is not None
    [first, again] = counterexample.history.decisions, counterexample.history.second_run or []
    index = counterexample.violation.decision
    assert first[:index] == again[:index] and first[index] != again[index]


class ShortestFirst:
    """Reserves nothing, so that several half-computed prompts hold the whole KV cache and none can go on."""

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes(preempt_newest=True)
        for request in sorted([*view.prefilling, *view.waiting], key=lambda request: request.num_ready):
            if plan.num_tokens < CHUNK:
                plan.add(request, CHUNK - plan.num_tokens)
        return plan.build()


def test_a_deadlock_of_half_computed_prompts_is_found() -> None:
    counterexample = search(ShortestFirst(), NEEDED, CHUNK, num_random=0, tiny=tight_scenarios(CHUNK))["ends"]
    assert counterexample is not None
    assert (
        "empty plan with 0 waiting and 2 running requests (request 0 first), nothing in flight"
        in counterexample.violation.why
    )
    assert counterexample.history.scenario in all_scenarios(CHUNK)


@pytest.mark.parametrize(("empty_plans", "ends"), [(60, True), (59, False)])
def test_a_policy_that_waits_ends_with_more_patience(empty_plans: int, ends: bool) -> None:
    late = Planned(lambda view, plan: plan if view.now >= 60 else Plan(wake_at=view.now + 1))
    few, patience = list(islice(tiny_scenarios(CHUNK), 3)), Patience(empty_plans=empty_plans)
    verdicts = search(late, [BY_NAME["ends"]], CHUNK, num_random=0, tiny=few, patience=patience)
    assert (verdicts["ends"] is None) is ends


def test_a_random_counterexample_is_shrunk() -> None:
    """The policy fails with prompts of 13 tokens and more."""

    def plan_short(view: View, plan: Plan) -> Plan:
        assert all(count <= 12 for count in plan.num_tokens)
        return plan

    counterexample = search(Planned(plan_short), NEEDED[:1], CHUNK, num_random=100, tiny=[])["legal"]
    assert counterexample is not None
    assert counterexample.history.scenario.arrivals == (Arrival(13, 1, 0),)


class Ranked(Orca):
    def __init__(self) -> None:
        self.served = 0
        self.rank = lambda request: self.served


@pytest.mark.parametrize(
    ("policy", "problem"),
    [(Planned(line for line in "ab"), "cannot be copied"), (Ranked(), r"self\.rank is a function over")],
)
def test_a_policy_that_cannot_be_copied_is_refused(policy: Policy, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"policy {type(policy).__name__}.*{problem}"):
        search(policy, PROPERTIES, CHUNK, num_random=0)


class Late(Orca):
    """Computes nothing for the newest request once it has waited, or run, for 5 s: longer than any scenario takes."""

    steady = True

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        for request in [*view.running, *view.waiting]:
            if view.now - request.arrival_time < 5 or request.id == 0:
                plan.add(request, reserve=request.max_tokens)
        return plan.build()


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (note_iteration, None),
        (
            reserve_in_turn,  # in one block
            r".*reserve=\(\(0, 5\),\).* is followed by .*reserve=\(\(0, 4\),\).*, although nothing has changed",
        ),
    ],
)
def test_a_plan_is_steady_whatever_its_note_and_a_counterexample_shows_what_differs(
    plan: Callable[[View, Plan], Plan], why: str | None
) -> None:
    one = [Scenario((Arrival(1, 4, 0),), 1, 5, 1, 8, asynchronous=False)]
    counterexample = search(Planned(plan), [BY_NAME["steady"]], CHUNK, num_random=0, tiny=one)["steady"]
    assert re.fullmatch(str(why), str(counterexample and counterexample.violation.why))
    assert play(Planned(plan), one[0]).ending is Ending.COMPLETE


def test_a_rule_in_seconds_is_not_steady() -> None:
    verdicts = search(Late(), [BY_NAME["steady"]], CHUNK, num_random=0, tiny=few_scenarios(CHUNK))
    assert verdicts["steady"] is not None and "only 900 s have passed" in verdicts["steady"].violation.why
