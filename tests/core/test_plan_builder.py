"""The plan builder: it says why it grants nothing, and which call no plan may contain."""

from collections.abc import Callable
from typing import Any

import pytest
from schedules import make_engine

from cbatch import Limits, Plan, PlanBuilder, PlanError, PolicyError, Refusal, Request, View
from policies.orca import Orca

Fill = Callable[[PlanBuilder, View], object]


class Scripted:
    """Fills one plan after another by the given functions; then serves like `Orca`."""

    def __init__(self, *fill: Fill) -> None:
        self.fill = list(fill)

    def plan(self, view: View) -> Plan:
        if not self.fill:
            return Orca().plan(view)
        plan = view.plan()
        self.fill.pop(0)(plan, view)
        return plan.build()


def run(*fill: Fill, limits: Limits, num_blocks: int = 100, num_requests: int = 3) -> None:
    """Requests of 4 prompt and 4 new tokens each, with blocks of 4."""
    engine = make_engine(Scripted(*fill), limits, num_blocks=num_blocks)
    engine.submit(Request(id_, 4, 4) for id_ in range(num_requests))
    engine.run()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda plan, view: plan.preempt(view.waiting[0]), "only a running request can be preempted"),
        (lambda plan, view: plan.reject(next(iter(view.running)), ""), "only a waiting request can be rejected"),
        (lambda plan, view: [plan.preempt(next(iter(view.running))) for _ in "ab"], "preempted twice"),
        (lambda plan, view: [plan.reject(view.waiting[0], "") for _ in "ab"], "rejected twice"),
        (lambda plan, view: plan.add(view.waiting[0], 2.5), "num_tokens=2.5"),
        (lambda plan, view: plan.add(view.waiting[0], reserve=2.5), "reserve=2.5"),
        (lambda plan, view: plan.add(view.waiting[0], reserve=-1), "reserve=-1"),
        (lambda plan, view: plan.add(view.waiting[0], float("nan")), "num_tokens=nan"),
    ],
)
def test_a_call_that_no_plan_may_contain_names_policy_request_rule_and_line(wrong: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        run(lambda plan, view: plan.add(view.waiting[0]), wrong, limits=Limits(4, 12, 40))
    text = str(caught.value)
    assert text.startswith("policy Scripted, iteration 1, request ")
    assert message in text and "; rule: " in text and "(test_plan_builder.py:" in text and "\n" not in text


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
        refusal(plan, waiting[1], whole=True)  # 3 of its 4 tokens are left
        refusal(plan, waiting[1])
        refusal(plan, waiting[2])

    def second(plan: PlanBuilder, view: View) -> None:
        refusal(plan, view.waiting[0])
        for request in view.running:  # a decode, and the last token of a prompt
            refusal(plan, request)

    run(first, second, limits=Limits(max_batch=2, max_tokens=7, max_request_tokens=40), num_blocks=3)
    of_first = [Refusal.GONE, Refusal.NONE_ASKED, None, Refusal.NAMED, Refusal.BLOCKS, Refusal.TOKENS]
    assert found == [*of_first, None, Refusal.ROWS, Refusal.PLACES, None, None]


def test_padding_fits_the_finished_plan() -> None:
    def early(plan: PlanBuilder, view: View) -> None:
        plan.pad_to(5)
        for request in view.waiting:
            plan.add(request)

    policy = Scripted(early, lambda plan, view: [plan.add_decodes(), plan.pad_to(1000)])
    engine = make_engine(policy, Limits(max_batch=3, max_tokens=16, max_request_tokens=40))
    engine.submit(Request(id_, 4, 2) for id_ in range(2))
    assert [step.num_padding_tokens for step in engine.run().steps] == [0, 14]


def test_an_empty_plan_whose_adds_were_refused_says_why() -> None:
    cause = r"empty plan with 1 waiting .*; its last add granted nothing \(fewer than one token was asked for\); plan a"
    with pytest.raises(PolicyError, match=cause):
        run(lambda plan, view: plan.add(view.waiting[0], -5), limits=Limits(2, 12, 40), num_requests=1)


@pytest.mark.parametrize(
    ("wake_at", "remedy"), [(float("inf"), "give build(wake_at=...)"), (0.0, "give a wake_at after now=0")]
)
def test_a_wake_time_that_never_comes_is_none(wake_at: float, remedy: str) -> None:
    class Never:
        def plan(self, view: View) -> Plan:
            return view.plan().build(wake_at=wake_at)

    engine = make_engine(Never(), Limits(2, 12, 40))
    engine.submit([Request(0, 4, 2)])
    with pytest.raises(PolicyError) as caught:
        engine.run()
    assert str(caught.value).endswith(f"plan a request, preempt one, or {remedy}")
