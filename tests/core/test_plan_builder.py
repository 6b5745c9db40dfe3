"""The plan builder: no sequence of its calls makes a plan that the engine refuses, and it says why it grants nothing."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedules import UnitCost, make_engine

from cbatch import Engine, Limits, Plan, PlanBuilder, PlanError, PolicyError, Refusal, Request, View
from cbatch.sim.executor import SimExecutor
from policies.orca import Orca

LIMITS = Limits(max_batch=3, max_tokens=16, max_request_tokens=40)

amounts = st.none() | st.integers(-2, 20) | st.just(float("inf"))
CALLS: dict[str, st.SearchStrategy[Any]] = {
    "add": st.fixed_dictionaries({"num_tokens": amounts, "reserve": st.integers(-1, 50), "whole": st.booleans()}),
    "add_decodes": st.fixed_dictionaries({"at_most": st.none() | st.integers(-2, 4), "preempt_newest": st.booleans()}),
    "preempt": st.just({}),
    "reject": st.just({"reason": "why"}),
    "pad_to": st.fixed_dictionaries({"num_tokens": st.integers(-5, 30)}),
}
calls = st.one_of(
    st.tuples(st.just(name), st.integers(0, 9), arguments)
    for name, arguments in {**CALLS, "add once more": CALLS["add"]}.items()  # the most frequent call
)
plans = st.lists(st.tuples(st.lists(calls, min_size=2, max_size=9), st.none() | st.floats(0, 40)), min_size=1)


class AnyCalls:
    """Serves like `Orca` for some iterations; then makes the given calls, each for one of all requests there are."""

    def __init__(self, script: list[Any], requests: list[Request], begin: int) -> None:
        self.script, self.requests, self.begin = list(script), requests, begin

    def plan(self, view: View) -> Plan:
        if view.iteration < self.begin:
            return Orca().plan(view)
        to_call, wake_at = self.script.pop(0)
        plan = view.plan()
        for name, number, arguments in to_call:
            method = getattr(plan, name.split()[0])
            try:
                method(*[] if name in ("add_decodes", "pad_to") else [self.requests[number]], **arguments)
            except PlanError:
                if name not in ("preempt", "reject"):
                    raise
        return plan.build(wake_at=wake_at)


@pytest.mark.parametrize("num_stages", [0, 1, 3], ids=["sync", "async", "pipeline"])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=plans, begin=st.integers(0, 4), blocks=st.integers(10, 24))
def test_no_sequence_of_calls_builds_a_plan_that_the_engine_refuses(
    num_stages: int, script: list[Any], begin: int, blocks: int
) -> None:
    requests = [Request(id_, 1 + 3 * (id_ % 4), 1 + id_ % 5, arrival_time=float(id_ // 4)) for id_ in range(9)]
    executor = SimExecutor(UnitCost())
    executor.num_stages = max(num_stages, 1)
    limits = Limits(LIMITS.max_batch, LIMITS.max_tokens, 40, num_stages=executor.num_stages)
    policy = AnyCalls(script, [*requests, Request(99, 3, 3)], begin)  # the last is a stranger
    engine = Engine(policy, executor, limits, UnitCost(), num_blocks=blocks, block_size=2, asynchronous=num_stages > 0)
    engine.submit(requests)
    while policy.script and engine.num_unfinished:
        with suppress(PolicyError):  # nothing was planned, and nothing is to come
            engine.step()


class Scripted:
    """Fills one plan after another by the given functions; then serves like `Orca`."""

    def __init__(self, *fill: Callable[[PlanBuilder, View], object]) -> None:
        self.fill = list(fill)
        self.plans: list[str] = []

    def plan(self, view: View) -> Plan:
        if not self.fill:
            return Orca().plan(view)
        plan = view.plan()
        self.fill.pop(0)(plan, view)
        built = plan.build()
        self.plans.append(f"{built} -{[request.id for request in built.preempt]} free={plan.free_blocks}")
        return built


def run(*fill: Callable[[PlanBuilder, View], object], num_blocks: int = 100) -> list[str]:
    """The plans of three requests of 4 prompt and 4 new tokens each, with blocks of 4."""
    policy = Scripted(*fill)
    engine = make_engine(policy, Limits(4, 12, 40), num_blocks=num_blocks)
    engine.submit(Request(id_, 4, 4) for id_ in range(3))
    engine.run()
    return policy.plans


def add_all(plan: PlanBuilder, view: View) -> None:
    for request in view.waiting:
        plan.add(request)


def test_a_preempted_request_is_not_among_the_decodes() -> None:
    def fill(plan: PlanBuilder, view: View) -> None:
        plan.preempt(list(view.running)[1])
        assert plan.add_decodes() == 2

    assert run(add_all, fill)[1] == "Plan(0:1 2:1) -[1] free=96"


def test_decodes_that_were_added_before_are_left_out() -> None:
    def fill(plan: PlanBuilder, view: View) -> None:
        assert plan.add(list(view.running)[1]) == 1
        assert plan.add_decodes() == 2
        assert plan.add_decodes() == plan.add(next(iter(view.running))) == 0
        assert plan.refusal is Refusal.NAMED

    def fill_one_by_one(plan: PlanBuilder, view: View) -> None:
        assert plan.add_decodes(at_most=1) == plan.add_decodes(at_most=1) == 1
        for request in list(view.running)[:2]:
            assert plan.add(request) == 0
            assert plan.refusal is Refusal.NAMED

    plans = run(add_all, fill, fill_one_by_one)
    assert plans[1:] == ["Plan(1:1 0:1 2:1) -[] free=94", "Plan(0:1 1:1) -[] free=94"]


@pytest.mark.parametrize("at_most", [None, 1, 0, -1])
def test_at_most_counts_those_that_are_added(at_most: int | None) -> None:
    def fill(plan: PlanBuilder, view: View) -> None:
        plan.preempt(next(iter(view.running)))
        assert plan.add_decodes(at_most=at_most) == (2 if at_most is None else max(at_most, 0))

    run(add_all, fill)


def test_preempting_takes_back_what_the_plan_granted() -> None:
    """As in vLLM's scheduler: the tokens that the victim had been granted return to the budget."""

    def fill(plan: PlanBuilder, view: View) -> None:
        first, *_ = view.running
        plan.add(first, reserve=8)
        plan.add_decodes()
        assert (plan.num_tokens, plan.num_requests, plan.free_blocks) == (3, 3, 94)
        plan.preempt(first)
        assert (plan.num_tokens, plan.num_requests, plan.tokens_left, plan.rows_left) == (2, 2, 10, 2)
        assert plan.free_blocks == 96  # the two of the decodes stay
        assert plan.plan.reserve == {}

    assert run(add_all, fill)[1] == "Plan(1:1 2:1) -[0] free=96"


def test_a_preempted_request_leaves_one_place() -> None:
    def fill(plan: PlanBuilder, view: View) -> None:
        first, *_ = view.running
        plan.add(first)
        plan.preempt(first)
        assert plan.add(view.waiting[0]) == 4
        assert plan.add(view.waiting[1]) == 0
        assert plan.refusal is Refusal.PLACES

    engine = make_engine(Scripted(add_all, fill), LIMITS)
    engine.submit(Request(id_, 4, 4) for id_ in range(5))
    engine.run()


def test_rejecting_takes_back_the_admission() -> None:
    def fill(plan: PlanBuilder, view: View) -> None:
        add_all(plan, view)
        plan.reject(view.waiting[1], "too late")
        assert (plan.free_blocks, plan.rows_left, plan.tokens_left) == (98, 2, 4)

    assert run(fill) == ["Plan(0:4 2:4) -[] free=98"]


def test_requests_may_be_rejected_one_by_one() -> None:
    def reject(plan: PlanBuilder, view: View) -> None:
        plan.reject(view.waiting[0], "all are")

    policy = Scripted(reject, reject, reject)
    engine = make_engine(policy, LIMITS)
    engine.submit(Request(id_, 4, 4) for id_ in range(3))
    assert [request.reject_reason for request in engine.run().requests] == ["all are"] * 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda plan, view: plan.preempt(view.waiting[0]), "only a running request can be preempted"),
        (lambda plan, view: plan.reject(next(iter(view.running)), ""), "only a waiting request can be rejected"),
        (lambda plan, view: [plan.preempt(next(iter(view.running))) for _ in "ab"], "preempted twice"),
        (lambda plan, view: [plan.reject(view.waiting[0], "") for _ in "ab"], "rejected twice"),
        (lambda plan, view: plan.add(view.waiting[0], 2.5), "num_tokens=2.5"),
        (lambda plan, view: plan.add(view.waiting[0], reserve=2.5), "reserve=2.5"),
        (lambda plan, view: plan.add(view.waiting[0], float("nan")), "num_tokens=nan"),
    ],
)
def test_a_call_that_no_plan_may_contain_names_policy_request_rule_and_line(wrong: Any, message: str) -> None:
    def one(plan: PlanBuilder, view: View) -> None:
        plan.add(view.waiting[0])

    with pytest.raises(PlanError) as caught:
        run(one, wrong)
    text = str(caught.value)
    assert text.startswith("policy Scripted, iteration 1, request ")
    assert message in text and "; rule: " in text and "(test_plan_builder.py:" in text and "\n" not in text


@pytest.mark.parametrize(
    "name", ["wake_at", "note", "reserve", "num_tokens", "tokens_left", "free_blocks", "preempt", "plan"]
)
def test_nothing_can_be_assigned(name: str) -> None:
    with pytest.raises(PolicyError, match=rf"AttributeError: .*{name}.*test_plan_builder.py:"):
        run(lambda plan, view: setattr(plan, name, 3))


def test_add_says_why_it_grants_nothing() -> None:
    found: list[Refusal | None] = []

    def refusal(plan: PlanBuilder, request: Request, *arguments: Any, **options: Any) -> None:
        granted = plan.add(request, *arguments, **options)
        assert (granted == 0) == (plan.refusal is not None)
        found.append(plan.refusal)

    def first(plan: PlanBuilder, view: View) -> None:
        waiting = list(view.waiting)
        refusal(plan, Request(99, 4, 4))
        refusal(plan, waiting[0], 0)
        refusal(plan, waiting[0], reserve=100)  # no more than its 8 tokens: 2 of 3 blocks
        refusal(plan, waiting[0])
        refusal(plan, waiting[1], reserve=5)
        refusal(plan, waiting[1])
        refusal(plan, waiting[2])

    def second(plan: PlanBuilder, view: View) -> None:
        refusal(plan, view.waiting[0])
        refusal(plan, next(iter(view.running)))

    limits = Limits(max_batch=2, max_tokens=12, max_request_tokens=40)
    engine = make_engine(Scripted(first, second), limits, num_blocks=3)
    engine.submit(Request(id_, 4, 4) for id_ in range(3))
    engine.run()
    of_first = [Refusal.GONE, Refusal.NONE_ASKED, None, Refusal.NAMED, Refusal.BLOCKS, None, Refusal.ROWS]
    assert found == [*of_first, Refusal.PLACES, None]


def test_an_empty_plan_whose_adds_were_refused_says_why() -> None:
    engine = make_engine(Scripted(lambda plan, view: plan.add(view.waiting[0], -5)), Limits(2, 12, 40))
    engine.submit([Request(0, 4, 4)])
    cause = r"empty plan with 1 waiting .*; its last add granted nothing \(fewer than one token was asked for\); plan a"
    with pytest.raises(PolicyError, match=cause):
        engine.run()


def test_a_prompt_that_must_be_whole_is_refused_for_lack_of_tokens() -> None:
    def short(plan: PlanBuilder, view: View) -> None:
        plan.add(view.waiting[0])
        plan.add(view.waiting[1])
        assert plan.add(view.waiting[2], whole=True) == 0
        assert plan.refusal is Refusal.TOKENS

    engine = make_engine(Scripted(short), Limits(3, 11, 40))
    engine.submit(Request(id_, 4, 4) for id_ in range(3))
    engine.run()


def test_padding_fits_the_finished_plan() -> None:
    def early(plan: PlanBuilder, view: View) -> None:
        plan.pad_to(5)
        add_all(plan, view)

    policy = Scripted(early, lambda plan, view: [plan.add_decodes(), plan.pad_to(1000)])
    engine = make_engine(policy, LIMITS)
    engine.submit(Request(id_, 4, 2) for id_ in range(2))
    assert [step.num_padding_tokens for step in engine.run().steps] == [0, 14]


def test_a_wake_time_beside_requests_to_compute_or_without_requests_has_no_effect() -> None:
    seen: list[float] = []

    class Waking(Orca):
        def plan(self, view: View) -> Plan:
            seen.append(view.now)
            plan = super().plan(view)
            plan.wake_at = view.now + 0.25
            return plan

    engine = make_engine(Waking(), LIMITS)
    engine.submit([Request(0, 4, 2), Request(1, 4, 1, arrival_time=5.0)])
    engine.run()
    assert seen == [0.0, 1.0, 2.0, 5.0]


@pytest.mark.parametrize(
    ("wake_at", "remedy"), [(float("inf"), "give build(wake_at=...)"), (0.0, "give a wake_at after now=0")]
)
def test_a_wake_time_that_never_comes_is_none(wake_at: float, remedy: str) -> None:
    class Never:
        def plan(self, view: View) -> Plan:
            return view.plan().build(wake_at=wake_at)

    engine = make_engine(Never(), LIMITS)
    engine.submit([Request(0, 4, 2)])
    with pytest.raises(PolicyError) as caught:
        engine.run()
    assert str(caught.value).endswith(f"plan a request, preempt one, or {remedy}")
