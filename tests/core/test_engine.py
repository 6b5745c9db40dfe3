"""The engine's rules: what plans are refused, when it waits, and how blocks and rows are given back."""

from collections.abc import Callable

import pytest
from schedules import make_engine, schedule

from cbatch import Limits, Plan, PolicyError, Request, View
from cbatch.errors import WorkloadError
from policies.orca import Orca

LIMITS = Limits(max_batch=2, max_tokens=10, max_request_tokens=100)


class Scripted:
    """Answers each call with the next of the given functions; then like Orca."""

    def __init__(self, *answers: Callable[[View], object]) -> None:
        self.answers = list(answers)
        self.orca = Orca()

    def plan(self, view: View) -> Plan:
        return self.answers.pop(0)(view) if self.answers else self.orca.plan(view)  # type: ignore[return-value]


def test_a_request_that_the_cache_can_never_hold_is_refused_on_submission() -> None:
    engine = make_engine(Orca(), LIMITS, num_blocks=2, block_size=4)
    with pytest.raises(WorkloadError, match="request 2: 9 tokens exceed the KV cache of 8"):
        engine.submit([Request(2, 8, 1)])
    with pytest.raises(WorkloadError, match="exceed the 100 positions"):
        engine.submit([Request(3, 99, 2)])


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


def test_requests_cannot_be_submitted_twice() -> None:
    request = Request(0, 3, 1)
    engine = make_engine(Orca(), LIMITS)
    engine.submit([request])
    engine.run()
    with pytest.raises(WorkloadError, match="request 0 was submitted before"):
        engine.submit([request])


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
