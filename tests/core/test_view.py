"""What a policy sees beyond counters: who received tokens and when, when the iterations in flight end; paused requests."""

from contextlib import closing
from dataclasses import replace

import pytest
from schedules import UnitCost, make_engine
from small_cluster import make_executor as make_sim_executor
from tiny_models import LLAMA, greedy_references, make_executor

from cbatch import BatchShape, CostFunction, Engine, Limits, Plan, PolicyError, Request, View
from cbatch.errors import ConfigError
from cbatch.sim.executor import SimExecutor
from policies.orca import Orca

LIMITS = Limits(max_batch=2, max_tokens=10, max_request_tokens=100)


def predicted_and_true_ends(executor: SimExecutor, asynchronous: bool) -> list[tuple[float, float]]:
    """Returns, for each plan, the predicted and the true end of the iteration launched last."""
    predicted: dict[int, float] = {}

    class Predicting(Orca):
        def plan(self, view: View) -> Plan:
            predicted[view.iteration] = view.predicted_end
            return super().plan(view)

    limits = Limits(4, 64, 100, num_stages=executor.num_stages)
    engine = Engine(
        Predicting(), executor, limits, executor.cost, num_blocks=100, block_size=4, asynchronous=asynchronous
    )
    engine.submit(Request(id_, 3 + id_, 4 + id_) for id_ in range(12))
    ends = [0.0, *(step.ended for step in engine.run().steps)]
    return [(predicted[iteration], end) for iteration, end in enumerate(ends[:-1])]


def test_the_predicted_end_of_what_is_in_flight_comes_true() -> None:
    """Transfers, and the unequal work of a pipeline's first and last stage, are left out."""
    for asynchronous in (False, True):
        pairs = predicted_and_true_ends(make_sim_executor(1), asynchronous)
        assert len(pairs) > 30
        assert [predicted for predicted, _ in pairs] == pytest.approx([end for _, end in pairs], rel=1e-9)
    pairs = predicted_and_true_ends(make_sim_executor(4), True)[1:]
    errors = sorted(abs(predicted / end - 1) for predicted, end in pairs)
    assert errors[-1] < 0.15
    assert errors[len(errors) * 9 // 10] < 0.03


def test_the_predicted_end_asks_the_cost_model_once_for_each_iteration() -> None:
    """However often a policy reads it, in a plan or in several: of four stages, each iteration is in flight for four plans."""
    shapes: list[BatchShape] = []
    cost = CostFunction(lambda shape: shapes.append(shape) or 1.0)  # type: ignore[func-returns-value]

    class Reads(Orca):
        def plan(self, view: View) -> Plan:
            assert len({view.predicted_end for _ in range(5)}) == 1
            return super().plan(view)

    executor, limits = make_sim_executor(4), Limits(4, 64, 100, num_stages=4)
    engine = Engine(Reads(), executor, limits, cost, num_blocks=100, block_size=4)
    engine.submit(Request(id_, 3 + id_, 4 + id_) for id_ in range(12))
    steps = engine.run().steps
    assert 0.9 * len(steps) < len(shapes) <= len(steps)


class RoundRobin:
    """Admits all it may, and computes those that have waited longest for their turn."""

    def __init__(self) -> None:
        self.turns: dict[Request, int] = {}
        self.most_running = 0

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        self.most_running = max(self.most_running, len(view.running))
        for request in sorted([*view.waiting, *view.running], key=lambda request: self.turns.get(request, -1)):
            if plan.add(request):
                self.turns[request] = view.iteration
        return plan.build()


def test_paused_requests_cost_no_row_of_the_batch() -> None:
    """Real tokens: two rows in an iteration, eight requests admitted, none preempted."""
    references = greedy_references(LLAMA)[:10]
    limits = Limits(max_batch=2, max_tokens=64, max_request_tokens=64, max_running=8)
    requests = [reference.request(id_, 6) for id_, reference in enumerate(references)]
    policy = RoundRobin()
    with closing(make_executor(LLAMA, limits, 200, 4)) as executor:
        engine = Engine(policy, executor, limits, UnitCost(), num_blocks=200, block_size=4)
        engine.submit(requests)
        record = engine.run()
    assert [request.output for request in requests] == [reference.output[:6] for reference in references]
    assert policy.most_running == 8
    assert max(step.num_requests for step in record.steps) == 2
    assert {step.num_preempted for step in record.steps} == {0}


def test_as_many_are_admitted_as_the_pipeline_can_compute_unless_said_otherwise() -> None:
    assert Limits(4, 10, 10, num_stages=3).max_running == 12
    assert Limits(4, 10, 10, num_stages=3, max_running=5).max_running == 5
    assert replace(Limits(4, 10, 10, num_stages=3), max_batch=2).max_running == 6
    assert replace(Limits(4, 10, 10, max_running=5), max_batch=2).max_running == 5
    with pytest.raises(ConfigError, match="max_running=3 is below max_batch=4"):
        Limits(4, 10, 10, max_running=3)


def test_own_attributes_are_read_only() -> None:
    request = Request(0, 4, 4, extra={"difficulty": 3})
    assert request.extra["difficulty"] == 3
    assert Request(1, 4, 4).extra == {}

    class Writing(Orca):
        def plan(self, view: View) -> Plan:
            view.waiting[0].extra["difficulty"] = 4  # type: ignore[index]
            return super().plan(view)

    engine = make_engine(Writing(), LIMITS)
    engine.submit([request])
    with pytest.raises(PolicyError, match="does not support item assignment"):
        engine.run()
