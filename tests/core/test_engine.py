"""The engine's rules: what plans are refused, when it waits, and how blocks and rows are given back."""

from collections.abc import Callable

import pytest
from schedules import make_engine

from cbatch import SLO, Limits, Plan, PolicyError, Request, View
from cbatch.arrivals import Listed
from cbatch.errors import WorkloadError
from policies.orca import Orca

LIMITS = Limits(max_batch=2, max_tokens=10, max_request_tokens=100)


def test_a_request_that_can_never_be_served_or_was_is_refused_on_submission() -> None:
    engine = make_engine(Orca(), LIMITS, num_blocks=2, block_size=4)
    engine.submit([served := Request(1, 3, 1)])
    engine.run()
    for request, says in (
        (Request(2, 8, 2), "request 2: 9 tokens exceed the KV cache of 8"),
        (Request(3, 99, 2), "exceed the 100 positions"),
        (served, "request 1 was submitted before"),
    ):
        with pytest.raises(WorkloadError, match=says):
            engine.submit([request])


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda view: {}["nothing"], r"plan.. raised KeyError: 'nothing'"),
        (lambda view: Plan(), "empty plan with 1 waiting"),  # and nothing to come
    ],
)
def test_a_policy_that_fails_is_named(answer: Callable[[View], Plan], says: str) -> None:
    class Fails:
        def plan(self, view: View) -> Plan:
            return answer(view)

    engine = make_engine(Fails(), LIMITS)
    engine.submit([Request(0, 3, 3)])
    with pytest.raises(PolicyError, match=f"policy Fails, iteration 0: {says}"):
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
    engine.attach(Listed([Request(0, 3, 4), Request(1, 3, 1), Request(2, 3, 1)], {1: 2, 2: 50}))
    record = engine.run()
    times = {request.id: (request.arrival_time, request.admitted_at) for request in record.requests}
    assert times == {0: (0.0, 0.0), 1: (2.0, 2.0), 2: (4.0, 4.0)}


def test_requests_that_arrive_by_iteration_wait_in_the_order_of_arrival_and_show_its_time() -> None:
    """Requests 2, 1 and 3 come with the plans of 1, 2 and 3 s, while request 0 takes the only place until 5 s."""
    seen: list[list[tuple[int, float, float | None]]] = []

    class Alone(Orca):
        def plan(self, view: View) -> Plan:
            seen.append([(request.id, request.arrival_time, request.deadline) for request in view.waiting])
            return super().plan(view)

    engine = make_engine(Alone(), Limits(max_batch=1, max_tokens=40, max_request_tokens=100))
    requests = [Request(id_, 3, 5, slo=SLO(total=9.0)) for id_ in range(4)]
    engine.attach(Listed(requests, {1: 2, 2: 1, 3: 3}))
    engine.run()
    assert seen[4] == [(2, 1.0, 10.0), (1, 2.0, 11.0), (3, 3.0, 12.0)]


def test_a_full_table_grows_with_preempted_requests() -> None:
    """Requests that have been preempted keep their rows, so more rows than places come into use."""

    class Revolving:
        def plan(self, view: View) -> Plan:
            plan = view.plan()
            newcomers = [request for request in view.waiting if not request.num_preemptions][:2]
            for request in view.running if newcomers else ():
                plan.preempt(request)
            for request in newcomers or [*view.running, *view.waiting]:
                plan.add(request, 2 if newcomers else None)
            return plan.build()

    engine = make_engine(Revolving(), Limits(max_batch=2, max_tokens=40, max_request_tokens=100))
    engine.submit(requests := [Request(id_, 5, 3) for id_ in range(30)])
    assert len(engine.run().requests) == 30 and engine.state.table.num_rows >= 30
    assert [request.num_output_tokens for request in requests] == [3] * 30
    assert [request.num_recomputed_tokens for request in requests] == [2] * 28 + [0] * 2


def test_a_request_preempted_while_the_token_that_ends_it_is_in_flight_waits_no_more() -> None:
    class Preempts(Orca):
        def plan(self, view: View) -> Plan:
            plan = view.plan()
            for request in view.running:
                plan.preempt(request)
            return plan.build() if view.running else super().plan(view)

    engine = make_engine(Preempts(), LIMITS, asynchronous=True)
    engine.submit([request := Request(0, 4, 5, true_new_tokens=1)])
    engine.run()
    assert (request.num_preemptions, request.num_output_tokens, list(engine.view.waiting)) == (1, 1, [])


@pytest.mark.parametrize("name", ["on_token", "on_finished"])
def test_a_misspelt_hook_is_refused(name: str) -> None:
    policy = type("Mine", (Orca,), {name: lambda self, request: None})()
    with pytest.raises(PolicyError, match=f"policy Mine: {name} would never be called; the hooks are on_arrival"):
        make_engine(policy, LIMITS)


@pytest.mark.parametrize("name", ["now", "cost", "running", "mine"])
def test_a_policy_cannot_assign_to_the_view(name: str) -> None:
    class Assigns(Orca):
        def plan(self, view: View) -> Plan:
            setattr(view, name, getattr(view, name, 0.0))
            return super().plan(view)

    engine = make_engine(Assigns(), LIMITS)
    engine.submit([Request(0, 3, 3)])
    with pytest.raises(PolicyError, match=f"view.{name} cannot be assigned"):
        engine.run()
