"""The engine's rules: what plans are refused, when it waits, and how blocks and rows are given back."""

from collections.abc import Callable

import numpy as np
import pytest
from schedules import UnitCost, make_engine, schedule

from cbatch import Engine, FinishReason, Limits, Plan, PlanError, PolicyError, Request, Status, Step, StepResult, View
from cbatch.errors import WorkloadError
from cbatch.sim.executor import SimExecutor, Span
from policies.orca import Orca

LIMITS = Limits(max_batch=2, max_tokens=10, max_request_tokens=100)


class Scripted:
    """Answers each call with the next of the given functions; then like Orca."""

    def __init__(self, *answers: Callable[[View], object]) -> None:
        self.answers = list(answers)
        self.orca = Orca()

    def plan(self, view: View) -> Plan:
        return self.answers.pop(0)(view) if self.answers else self.orca.plan(view)  # type: ignore[return-value]


def entries(*pairs: tuple[int, int]) -> Callable[[View], Plan]:
    """A plan of (request id, tokens) pairs, found among those that wait and run."""

    def answer(view: View) -> Plan:
        known = {request.id: request for request in [*view.waiting, *view.running]}
        return Plan((known[id_], count) for id_, count in pairs)

    return answer


def altered(change: Callable[[Plan, View], object]) -> Callable[[View], Plan]:
    def answer(view: View) -> Plan:
        plan = Orca().plan(view)
        change(plan, view)
        return plan

    return answer


STRANGER = Request(99, 3, 3)

ILLEGAL = {
    "a request is named once": entries((0, 4), (0, 4)),
    "no more than are ready": entries((0, 9)),
    "at least 1 token": entries((0, 0)),
    "whole numbers": lambda view: Plan([(view.waiting[0], 1.5)]),
    "max_batch=2": entries((0, 1), (1, 1), (2, 1)),
    "max_tokens=10": entries((0, 8), (1, 8)),
    "is waiting, or running": lambda view: Plan([(STRANGER, 1)]),
    "NoneType, not a cbatch.Plan; return a Plan": lambda view: None,
    r"PlanBuilder, not a cbatch.Plan; return plan.build\(\)": lambda view: view.plan(),
    "pad_to lies between": altered(lambda plan, view: setattr(plan, "pad_to", 3)),
    "only a running request can be preempted": altered(lambda plan, view: plan.preempt.append(view.waiting[1])),
    "only a waiting request can be rejected": altered(lambda plan, view: plan.reject.append((STRANGER, "why"))),
    "preempted or rejected, and named again": altered(lambda plan, view: plan.reject.append((view.waiting[0], "why"))),
    "reserves no more KV cache than its longest": altered(
        lambda plan, view: plan.reserve.update({view.waiting[0]: 12})
    ),
    "a reservation belongs to a planned request": altered(lambda plan, view: plan.reserve.update({STRANGER: 5})),
}


@pytest.mark.parametrize("rule", ILLEGAL)
def test_an_illegal_plan_names_policy_iteration_and_rule(rule: str) -> None:
    engine = make_engine(Scripted(ILLEGAL[rule]), LIMITS)
    engine.submit(Request(index, 8, 3) for index in range(3))
    with pytest.raises(PlanError, match=rule) as caught:
        engine.run()
    assert "policy Scripted, iteration 0" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert engine.state.pool.num_used == 0  # nothing was changed before the check


def test_a_request_that_the_cache_can_never_hold_is_refused_on_submission() -> None:
    engine = make_engine(Orca(), LIMITS, num_blocks=2, block_size=4)
    with pytest.raises(WorkloadError, match="request 2: 9 tokens exceed the KV cache of 8"):
        engine.submit([Request(2, 8, 1)])
    with pytest.raises(WorkloadError, match="exceed the 100 positions"):
        engine.submit([Request(3, 99, 2)])


def test_the_kv_rule_names_the_first_request_that_does_not_fit() -> None:
    engine = make_engine(Scripted(entries((0, 7), (1, 3))), LIMITS, num_blocks=2, block_size=4)
    engine.submit([Request(0, 7, 1), Request(1, 3, 1)])
    with pytest.raises(PlanError, match=r"request 1: illegal plan .3 blocks planned, 2 free"):
        engine.run()


def test_a_policy_that_raises_is_named() -> None:
    engine = make_engine(Scripted(lambda view: {}["nothing"]), LIMITS)
    engine.submit([Request(0, 3, 3)])
    with pytest.raises(PolicyError, match=r"policy Scripted, iteration 0: plan.. raised KeyError: 'nothing'"):
        engine.run()


def test_an_empty_plan_with_nothing_to_come_is_an_error() -> None:
    class Lazy:
        def plan(self, view: View) -> Plan:
            return Plan()

    engine = make_engine(Lazy(), LIMITS)
    engine.submit([Request(0, 3, 3)])
    with pytest.raises(PolicyError, match="policy Lazy, iteration 0: empty plan with 1 waiting"):
        engine.run()


def test_a_policy_that_takes_requests_out_of_the_view_is_told_so() -> None:
    class Takes(Orca):
        def plan(self, view: View) -> Plan:
            if view.iteration == 0:
                view.waiting.pop()  # type: ignore[attr-defined]
            return super().plan(view)

    engine = make_engine(Takes(), Limits(1, 100, 100))
    engine.submit([Request(0, 3, 2), Request(1, 3, 2)])
    with pytest.raises(PolicyError, match=r"1 requests are gone from view\.waiting, .* copy it, as in list\(view"):
        engine.run()


@pytest.mark.parametrize("built", [False, True], ids=["plan", "builder"])
def test_an_empty_plan_waits_for_its_wake_time_or_the_next_arrival(built: bool) -> None:
    seen: list[float] = []

    class Patient(Orca):
        def plan(self, view: View) -> Plan:
            seen.append(view.now)
            if view.now >= 5:
                return super().plan(view)
            return view.plan().build(wake_at=5.0) if built else Plan(wake_at=5.0)

    engine = make_engine(Patient(), LIMITS)
    engine.submit([Request(0, 3, 1), Request(1, 3, 1, arrival_time=2.0)])
    engine.run()
    assert seen == [0.0, 2.0, 5.0]


def test_arrivals_by_iteration_wait_for_it_unless_nothing_else_is_left() -> None:
    engine = make_engine(Orca(), LIMITS)
    engine.submit([Request(0, 3, 4), Request(1, 3, 1, arrival_iteration=2), Request(2, 3, 1, arrival_iteration=50)])
    record = engine.run()
    admitted = {request.id: request.admitted_at for request in record.requests}
    assert admitted == {0: 0.0, 1: 2.0, 2: 4.0}


def test_rejected_requests_end_with_a_reason() -> None:
    def refuse(view: View) -> Plan:
        builder = view.plan()
        builder.reject(view.waiting[0], "too long")
        builder.add(view.waiting[1])
        return builder.build()

    engine = make_engine(Scripted(refuse), LIMITS)
    engine.submit(Request(index, 3, 2) for index in range(2))
    record = engine.run()
    ends = {request.id: (request.finish_reason, request.reject_reason) for request in record.requests}
    assert ends == {0: (FinishReason.REJECTED, "too long"), 1: (FinishReason.LENGTH, "")}


def test_optional_methods_of_a_policy_are_called() -> None:
    calls: list[str] = []

    class Listening(Orca):
        def on_arrival(self, request: Request) -> None:
            calls.append(f"arrival {request.id}")

        def on_step(self, record: object) -> None:
            calls.append("step")

        def on_finish(self, request: Request) -> None:
            calls.append(f"finish {request.id} {request.num_output_tokens}")

    engine = make_engine(Listening(), LIMITS)
    engine.submit([Request(0, 3, 2)])
    engine.run()
    assert calls == ["arrival 0", "step", "step", "finish 0 2"]


def test_blocks_of_a_request_preempted_in_flight_count_as_taken_until_that_iteration_ends() -> None:
    def preempt(view: View) -> Plan:
        builder = view.plan()
        victim = next(iter(view.running))
        taken = view.kv.num_blocks - view.kv.num_free
        builder.preempt(victim)
        assert builder.free_blocks == view.kv.num_free  # nothing for this plan
        builder.add(view.waiting[0])
        seen.append((taken, view.kv.num_retiring))
        return builder.build()

    def look(view: View) -> Plan:
        seen.append((view.kv.num_blocks - view.kv.num_free, view.kv.num_retiring))
        return Orca().plan(view)

    seen: list[tuple[int, int]] = []
    engine = make_engine(Scripted(entries((0, 8)), preempt, look), LIMITS, asynchronous=True)
    engine.submit([Request(0, 8, 4), Request(1, 5, 4)])
    engine.run()
    assert seen == [(2, 0), (2, 0)]  # 2 blocks of request 0; then 2 of request 1, those of request 0 given back
    assert engine.state.pool.num_used == 0


def test_a_preempted_request_was_admitted_when_it_first_was() -> None:
    def instead(view: View) -> Plan:
        builder = view.plan()
        builder.preempt(next(iter(view.running)))
        builder.add(view.waiting[0])
        return builder.build()

    engine = make_engine(Scripted(entries((0, 8)), instead), LIMITS)
    first, second = Request(0, 8, 2), Request(1, 5, 2)
    engine.submit([first, second])
    engine.run()
    assert first.num_preemptions == 1
    assert (first.admitted_at, second.admitted_at) == (0.0, 1.0)  # not 2.0


def test_requests_cannot_be_submitted_twice() -> None:
    request = Request(0, 3, 1)
    engine = make_engine(Orca(), LIMITS)
    engine.submit([request])
    engine.run()
    with pytest.raises(WorkloadError, match="request 0 was submitted before"):
        engine.submit([request])


class Stopping(SimExecutor):
    """Computes token 7 for everyone, from the given iteration on token 1."""

    needs_tokens = True

    def __init__(self, stop_at: int) -> None:
        super().__init__(UnitCost())
        self.stop_at = stop_at

    def launch(self, step: Step) -> Span:
        self.tokens = getattr(self, "tokens", {})
        span = super().launch(step)
        self.tokens[span] = np.full(len(step.rows), 1 if step.index >= self.stop_at else 7, np.int32)
        return span

    def wait(self, in_flight: Span) -> StepResult:
        return super().wait(in_flight)._replace(tokens=self.tokens.pop(in_flight))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stop_token_ends_a_request_and_what_came_after_it_is_discarded(asynchronous: bool) -> None:
    """Asynchronously, exactly one iteration too many is computed: the one launched before the stop token was seen."""
    engine = Engine(Orca(), Stopping(2), LIMITS, UnitCost(), num_blocks=50, block_size=4, asynchronous=asynchronous)
    request = Request(0, 3, 20, prompt=[5, 5, 5], stop_tokens=[1])
    engine.submit([request])
    record = engine.run()
    assert request.output == [7, 7, 1]
    assert request.finish_reason is FinishReason.STOP
    assert engine.state.num_overshoot_tokens == int(asynchronous)
    assert len(record.steps) == 3 + asynchronous
    assert len(record.tokens()[0]) == 3
    assert request.status is Status.FINISHED and request.num_tokens == 6


def test_a_full_table_grows_with_preempted_requests() -> None:
    """Requests that have been preempted keep their rows, so more rows than places come into use."""

    class Revolving:
        def plan(self, view: View) -> Plan:
            builder = view.plan()
            if view.iteration < 40 and view.waiting:
                for request in view.running:
                    builder.preempt(request)
                for request in list(view.waiting)[-2:]:
                    builder.add(request, 2)
            else:
                for request in [*view.running, *view.waiting]:
                    builder.add(request)
            return builder.build()

    lengths = [(5, 3)] * 30
    _, record = schedule(Revolving(), lengths, batch=2, max_tokens=40)
    assert len(record.requests) == 30
    assert sum(request.num_preemptions for request in record.requests) > 30
