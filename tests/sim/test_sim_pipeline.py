"""The simulated executor: its clock, its pipeline, and where every second of every stage went."""

import random
from collections.abc import Callable
from dataclasses import astuple
from itertools import pairwise

import pytest
from fuzz_policy import FuzzPolicy
from schedules import UnitCost
from small_cluster import make_engine, make_executor

from cbatch import BatchShape, Engine, FinishReason, Limits, Plan, Policy, Request, RunRecord, Server, Step, View
from cbatch.arrivals import Listed
from cbatch.kv import KVSize
from cbatch.sim.executor import SimExecutor
from cbatch.sim.measured import HostTime
from cbatch.sim.stages import Cause, Span, StageAccount, Stages, bubble_kind
from cbatch.sim.times import StageTimes
from policies.chunking import TileAligned
from policies.mc_sf import McSf
from policies.orca import Orca
from policies.predictors import Noisy
from policies.prefill_first import PrefillFirst
from policies.sarathi import Sarathi

PROMPT, LONG_PROMPT = BatchShape(((10, 0),)), BatchShape(((20, 0),))
DECODES, LATER_DECODES = BatchShape((), 4, 40), BatchShape((), 4, 400)


def times(seconds: float, transfer: float = 0.0, stages: int = 2) -> StageTimes:
    return StageTimes(seconds, 0.0, 0.0, 0.0, (transfer,) * (stages - 1))


# -- one GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_host_time_is_added_in_sync_and_hidden_in_async(asynchronous: bool) -> None:
    """10 iterations of 1 s on the device and 0.25 s on the host."""
    executor = SimExecutor(UnitCost(), HostTime(0.2, seconds_per_request=0.05))
    engine = Engine(
        Orca(), executor, Limits(1, 8, 100), UnitCost(), num_blocks=50, block_size=4, asynchronous=asynchronous
    )
    engine.submit([Request(0, 5, 10)])
    steps = engine.run().steps
    assert steps[-1].ended == pytest.approx(0.25 + 10 if asynchronous else 10 * 1.25)
    assert all(later.started >= step.ended for step, later in pairwise(steps))
    (account,) = executor.accounts()
    assert (account.compute, account.host) == (pytest.approx(10), pytest.approx(0.25 if asynchronous else 2.5))


def test_the_virtual_clock_jumps_over_idle_time() -> None:
    executor = SimExecutor(UnitCost())
    engine = Engine(Orca(), executor, Limits(2, 8, 100), UnitCost(), num_blocks=50, block_size=4)
    engine.submit([Request(0, 4, 1), Request(1, 4, 1, arrival_time=1e6)])
    assert [step.started for step in engine.run().steps] == [0.0, 1e6]
    assert astuple(executor.accounts()[0]) == (2, 0, 0, 0, 0, 0, 0, 1e6 - 1)


# -- bubbles, by hand (SARATHI, Fig 5) --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (PROMPT, LONG_PROMPT, "pb1"),
        (DECODES, PROMPT, "pb2"),
        (PROMPT, DECODES, "pb2"),
        (DECODES, LATER_DECODES, "pb3"),
        (BatchShape(((10, 0),), 3, 30), BatchShape(((10, 90),), 3, 30), "pb3"),
    ],
)
def test_a_stage_waits_for_a_longer_iteration_in_the_stage_before(
    first: BatchShape, second: BatchShape, kind: str
) -> None:
    """stage 0 |1|  3  |, stage 1 . |1|. .|  3  |: it waits 2 s for the second iteration, after 1 s of filling."""
    assert bubble_kind(second, first) == kind
    stages = Stages(2)
    assert stages.launch(0.0, first, times(1.0)) == Span(0.0, 2.0, first, 0.0)
    assert stages.launch(0.0, second, times(3.0)) == Span(1.0, 7.0, second, 2.0)
    before, after = stages.close_accounts()
    assert before == StageAccount(compute=4.0, no_work=3.0)
    assert after == StageAccount(**{"compute": 4.0, "no_work": 1.0, kind: 2.0})


def test_waiting_for_a_message_is_communication() -> None:
    stages = Stages(2)
    stages.launch(0.0, PROMPT, times(1.0, transfer=0.5))
    assert stages.launch(0.0, PROMPT, times(1.0, transfer=0.75)) == Span(1.0, 3.75, PROMPT, 0.0)
    after = stages.close_accounts()[1]
    assert after == StageAccount(compute=2.0, communication=0.5 + 0.25, no_work=1.0)


def test_in_a_single_stage_all_operations_and_the_host_are_accounted_for() -> None:
    """5 s of operations less 0.25 s, 2 s of all-reduces, 1 s of embedding and 0.5 s of head, after the host has planned for 3 s."""
    stages, took = Stages(1), StageTimes(5.0, 2.0, 1.0, 0.5, ())
    stages.record_host(0.0, 3.0, Cause.HOST)
    assert stages.launch_alone(3.0, DECODES, took, 0.25, 3.0) == Span(3.0, 11.25, DECODES, 0.0)
    assert stages.accounts == [StageAccount(compute=6.25, communication=2.0, host=3.0)]
    idle = Stages(1)
    idle.launch_alone(3.0, DECODES, took, 0.25, 3.0)
    assert idle.accounts == [StageAccount(compute=6.25, communication=2.0, no_work=3.0)]  # nothing was recorded before


def test_waiting_for_the_tokens_of_an_iteration_in_flight_is_a_bubble_and_planning_is_the_hosts() -> None:
    """The host waits for the long prompt to leave stage 1 at 6 s and plans for 1 s; stage 0 has been idle since 4 s."""
    stages = Stages(2)
    stages.launch(0.0, LONG_PROMPT, times(3.0))
    stages.launch(0.0, DECODES, times(1.0))
    stages.record_host(0.0, 6.0, Cause.COMPUTE, LONG_PROMPT)
    stages.record_host(6.0, 7.0, Cause.HOST)
    stages.launch(7.0, DECODES, times(1.0))
    assert stages.close_accounts()[0] == StageAccount(compute=5.0, pb2=2.0, host=1.0, no_work=1.0)


def test_an_iteration_waits_for_the_tokens_that_it_carries_over() -> None:
    stages = Stages(2)
    long = stages.launch(0.0, LONG_PROMPT, times(3.0))
    stages.launch(0.0, DECODES, times(1.0))
    assert stages.launch(0.0, DECODES, times(1.0), carried_from=long).started == 6.0
    assert stages.close_accounts()[0] == StageAccount(compute=5.0, pb2=2.0, no_work=1.0)


def test_equal_iterations_fill_the_pipeline_but_for_the_output_head() -> None:
    """The last stage also computes the head, so each of the others waits for it once an iteration."""
    executor = make_executor(num_stages=4)
    engine = make_engine(Orca(), executor, batch=2)
    engine.submit(Request(index, 8, 1) for index in range(32))  # 16 iterations of two prompts
    steps = engine.run().steps
    assert len(steps) == 16
    head = make_executor(1).cost.execute(BatchShape((), 2, 2)).head  # type: ignore[attr-defined]
    for account in executor.accounts()[:-1]:
        assert 0 < account.bubbles <= 16 * head
    assert executor.accounts()[-1].bubbles == pytest.approx(0.0, abs=1e-12)
    assert all(later.started < step.ended for step, later in pairwise(steps))  # as many under way as stages


def test_a_pipeline_with_one_iteration_has_no_work_for_the_other_stages() -> None:
    executor = make_executor(num_stages=4)
    engine = make_engine(Orca(), executor, batch=2)
    engine.submit([Request(0, 8, 20)])
    end = engine.run().steps[-1].ended
    for account in executor.accounts():
        assert account.bubbles == 0.0
        assert account.no_work > 0.6 * end


# -- any policy, any depth --------------------------------------------------------------------------------------------


class Watched(SimExecutor):
    """Checks the order of things: a token is computed before it is used, and no stage computes two iterations at once."""

    def __init__(self, executor: SimExecutor) -> None:
        super().__init__(executor.cost, executor.host)
        self.spans: dict[int, Span] = {}

    def launch(self, step: Step) -> Span:
        span = super().launch(step)
        if (step.carry >= 0).any():
            assert span.started >= self.spans[step.index - self.num_stages].ended
        self.spans[step.index] = span
        return span


def check_run(record: RunRecord, executor: SimExecutor, requests: list[Request]) -> None:
    end = record.steps[-1].ended
    for account in executor.accounts():
        assert account.span == pytest.approx(end, abs=1e-9)
        assert min(astuple(account)) > -1e-12
    assert len(record.requests) == len(requests)
    ids = record.tokens()[0].tolist()
    for request in requests:
        if request.finish_reason is FinishReason.LENGTH:
            assert ids.count(request.id) == request.max_new_tokens


@pytest.mark.parametrize("seed", range(20))
def test_random_legal_policies_at_any_depth(seed: int) -> None:
    dice = random.Random(seed)
    stages, host = dice.choice([1, 2, 4, 8]), dice.choice([0.0, 1e-5, 1e-3])
    executor = Watched(make_executor(stages, tensor_parallel=dice.choice([1, 2]), host_seconds=host))
    engine = make_engine(
        FuzzPolicy(seed, rejects=0.02),
        executor,
        batch=dice.randint(1, 4),
        max_tokens=dice.randint(8, 40),
        num_blocks=dice.randint(15, 60),
        asynchronous=dice.random() < 0.5,
    )
    requests = [
        Request(index, dice.randint(1, 30), dice.randint(1, 20), arrival_time=dice.choice([0.0, dice.random()]))
        for index in range(16)
    ]
    engine.submit(requests)
    check_run(engine.run(), executor, requests)


def test_chunks_of_one_prompt_follow_each_other_through_the_pipeline() -> None:
    """A prompt of 32 in chunks of 8 on 4 stages: all four are under way at once."""
    executor = make_executor(num_stages=4)
    engine = make_engine(Sarathi(TileAligned(8)), executor, batch=2)
    engine.submit([Request(0, 32, 3)])
    steps = engine.run().steps
    assert [step.num_prefill_tokens for step in steps] == [8, 8, 8, 8, 0, 0]
    assert steps[3].started < steps[0].ended
    assert steps[4].started >= steps[3].ended  # its input is the token that the last chunk samples


def test_a_request_rejected_while_its_token_is_in_flight_receives_none() -> None:
    class Rejecting:
        """Computes request 0, preempts it while that is in flight, and rejects it while it still is."""

        def plan(self, view: View) -> Plan:
            plan, others = view.plan(), [request for request in view.waiting if request.id]
            match view.iteration:
                case 0:
                    plan.add(view.waiting[0])
                case 1:
                    plan.preempt(next(iter(view.running)))
                    plan.add(others[0])
                case 2:
                    plan.reject(view.waiting[0], "changed my mind")
                    plan.add(others[0])
                case _:
                    plan.add_decodes()
            return plan.build()

    engine = make_engine(Rejecting(), make_executor(num_stages=4))
    requests = [Request(0, 4, 2), Request(1, 4, 1), Request(2, 4, 1)]
    engine.submit(requests)
    record = engine.run()
    assert requests[0].finish_reason is FinishReason.REJECTED
    assert sorted(record.tokens()[0]) == [1, 2]
    assert engine.state.num_overshoot_tokens == 1
    assert engine.state.pool.num_used == 0


@pytest.mark.parametrize(
    ("policy", "seed"), [(PrefillFirst, 14), (lambda: McSf(Noisy(share=0.5)), 79)], ids=["prefill_first", "mc_sf"]
)
def test_a_request_recomputed_while_its_newest_token_is_in_flight_decodes_again(
    policy: Callable[[], Policy], seed: int
) -> None:
    """Preempted with a token in flight, it recomputes all others before that one arrives: one is left, as in a decode."""
    draw = random.Random(seed)
    requests = [Request(i, draw.randint(1, 80), draw.randint(1, 16)) for i in range(10)]
    limits = Limits(4, 256, 96, tile=32, num_stages=2)
    record = Server(make_executor(2), limits, UnitCost(), KVSize(7, 16)).serve(
        policy(), Listed(requests, {id_: id_ // 2 for id_ in range(10)}), on_step=check_latest_step
    )
    assert len(record.requests) == 10 and any(request.num_preemptions for request in requests)


def check_latest_step(engine: Engine) -> None:
    """The next plan for the same requests is checked with the rows and the number of decodes of the latest step."""
    if latest := engine.state.latest:
        assert latest.rows.tolist() == [request._row for request in latest.requests]
        assert latest.num_decode_tokens == sum(request in engine.view.decoding for request in latest.requests)


# -- arrivals ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_prompts_wait_as_in_a_queue_with_fixed_service(num_stages: int, asynchronous: bool) -> None:
    """A prompt at a time, Poisson arrivals: M/D/1 before the slowest stage, by Lindley's recursion over the same arrivals."""

    def first_tokens(times: list[float]) -> list[float]:
        engine = make_engine(Orca(), make_executor(num_stages), max_tokens=64, asynchronous=asynchronous)
        engine.submit([Request(id_, 64, 1, arrival_time=time) for id_, time in enumerate(times)])
        record = engine.run()
        return [request.finished_at for request in sorted(record.requests, key=lambda request: request.id)]

    alone, *_, before, last = first_tokens([0.0] * 40)
    service, draw, times, waits = last - before, random.Random(0), [0.0], [0.0]
    for _ in range(2000):
        interval = draw.expovariate(0.7 / service)
        times.append(times[-1] + interval)
        waits.append(max(waits[-1] + service - interval, 0.0))
    ttft = [end - time for end, time in zip(first_tokens(times), times, strict=True)]
    assert sum(ttft) == pytest.approx(len(times) * alone + sum(waits), rel=5e-3)
