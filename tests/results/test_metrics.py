"""The definitions of the metrics: on schedules computed by hand, and against loops over random records."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import make_engine

from cbatch import SLO, BatchShape, Engine, FinishReason, Limits, Plan, Request, RunRecord, View
from cbatch.arrivals import Listed
from cbatch.record import Life, StepRecord
from cbatch.results.metrics import Window, busy_seconds, collect_served
from cbatch.results.summary import summarize
from cbatch.results.waits import Waits
from cbatch.sim.executor import SimExecutor
from cbatch.sim.measured import HostTime
from policies.prefill_first import PrefillFirst

LIMITS = Limits(max_batch=4, max_tokens=100, max_request_tokens=100, tile=4)


def test_waiting_requests_are_averaged_from_the_first_arrival_to_the_last() -> None:
    """One waits until 0.5 s, the second from 1 to 3 s, of 4; the third from the last arrival on, which does not count."""
    arrival, none = np.array([0.0, 1.0, 4.0]), np.zeros(0)
    assert Waits(arrival, np.array([0.5, 3.0, 9.0])).mean == (0.5 + 2) / 4
    assert Waits(np.ones(3), np.array([0.5, 3.0, 9.0])).mean == 0.0, "a queue that is there from the start"
    assert Waits(none, none).mean == 0.0


def test_requests_that_leave_have_waited() -> None:
    """Two are served, the second with one token. The third leaves the queue, the fourth while it gets tokens, the fifth before its first one."""
    served, single, *left = requests = [Request(id_, 4, 9, arrival_time=float(id_)) for id_ in range(5)]
    admitted = (0.5, 1.5, None, 3.5, 4.25)
    for request, admitted_at, tokens in zip(requests, admitted, (9, 1, 0, 2, 0), strict=True):
        request.admitted_at, request.num_output_tokens, request.finished_at = admitted_at, tokens, 3.0 + request.id
        request.finish_reason = FinishReason.LENGTH if request in (served, single) else FinishReason.CANCELLED
    arrays = {
        "arrival": np.array([0.0, 1.0]),
        "first_token": np.array([1.0, 4.0]),
        "second_token": np.array([2.5, np.nan]),
    }
    waits = Waits.of([*reversed(left), single, served], replace(collect_served(RunRecord()), **arrays))
    assert np.array(waits).T.tolist() == [[0, 2.5], [1, 4], [4, 7], [3, 3.5], [2, 5]]


def test_a_queue_that_grows_is_told_from_one_that_stays() -> None:
    """One arrives each second, 200 in all: the limit is sqrt(200) / 2 = 7.1. At 1.2 s for each, a sixth of those that have arrived wait:

    from 25% to 62.5% of the time 15 on average, then 27. At 1.05 s they are 4 and 8. A queue that stays, of 50 s, grows in the first quarter alone.
    """
    arrival = np.arange(200.0)
    assert Waits(arrival, 1.2 * (arrival + 1)).grow and not Waits(arrival, 1.05 * (arrival + 1)).grow
    assert Waits(arrival, 1.2 * (arrival + 1)).between(0.625, 1) == pytest.approx(27, abs=1)
    assert not Waits(arrival, arrival + 50).grow
    assert not Waits(arrival, np.where(arrival < 190, arrival + 0.5, 1000.0)).grow, "the last ones alone wait long"
    assert not Waits(np.zeros(200), arrival).grow and not Waits(np.zeros(0), np.zeros(0)).grow
    assert not Waits(np.zeros(1), np.array([9.0])).grow
    bursts = np.repeat(arrival[::20], 20)  # ten bursts of 20: gaps vary 4 times as much as those of Poisson
    assert not Waits(bursts, bursts + np.linspace(1.0, 60.0, 200)).grow


@pytest.mark.parametrize(
    ("load", "number", "least", "most"),
    [(0.9, 1000, 0, 0.02), (1.02, 1000, 0.1, 0.5), (1.02, 10_000, 0.5, 1), (1.1, 200, 0.3, 0.6), (1.1, 1000, 0.8, 1)],
)
def test_overload_is_told_from_stable_queues(load: float, number: int, least: float, most: float) -> None:
    """M/D/1 queues of `number` requests: the share of 100 that count as overloaded, as docs/hardware-profiles.md states it."""
    numbers, found = np.random.default_rng(0), 0
    for _ in range(100):
        arrival, work = np.cumsum(numbers.exponential(1, number)), load * np.arange(1, number + 1)
        found += Waits(arrival, work + np.maximum.accumulate(arrival - work + load)).grow
    assert least <= found / 100 <= most


def test_a_request_whose_client_has_left_is_missed_and_in_no_latency() -> None:
    """Both get a token at 1, 2 and 3 s. Request 1 leaves at 2.5 s: at 3 s it is cancelled, and request 0 has ended."""
    engine = make_engine(PrefillFirst(), LIMITS)
    slo = SLO(total=10.0)
    engine.submit([Request(0, 4, 3, slo=slo), Request(1, 5, 9, slo=slo, timeout=2.5)])
    record = engine.run()
    found = summarize(record, num_blocks=100, max_batch=4, readings=np.array([(0.0, 0.0), (3.0, 300.0)]))
    each = [request.num_output_tokens for request in record.requests]
    assert each == [3, 3] and found["energy"]["joules_per_token"] == 300 / 6, "its tokens took energy, too"
    run = {"requests": 2, "rejected_requests": 0, "cancelled_requests": 1, "counted_requests": 1}
    assert run.items() <= found["run"].items()
    assert found["ttft_seconds"]["mean"] == found["tbt_seconds"]["p99"] == 1.0
    assert found["throughput"]["total_tokens_per_second"] == pytest.approx((4 + 3) / 3)
    assert found["attainment"] == {"requests": 2, "share": 0.5, "total_share": 0.5, "tiers": {}}
    assert found["goodput"]["attained_share"] == 0.5


def test_what_the_prefix_cache_held_counts_once_per_admitted_request() -> None:
    """The cache held 6 tokens of the first prompt, and 5 after its preemption. Prompts have 8, 4 and 4 tokens; the last was never admitted."""
    record = RunRecord()
    record.requests += [Request(0, 8, 1, client="a"), Request(1, 4, 1, client="b", tier="gold"), Request(2, 4, 1)]
    for request in record.requests:
        request.finish_reason, request.finished_at = FinishReason.REJECTED, 0.0
    first, second, _ = record.requests
    first.admitted_at = second.admitted_at = 0.0
    first.num_cached_tokens, first.num_cached_again = 6, 5
    found = summarize(record, num_blocks=1, max_batch=1, num_evicted_blocks=7)["prefix_cache"]
    all_, none = (
        {"hit_share": 0.75, "cached_tokens": 6, "cached_again_tokens": 5},
        dict.fromkeys(found["clients"]["b"], 0),
    )
    assert (found.pop("clients"), found.pop("tiers")) == ({"a": all_, "b": none}, {"gold": none})
    assert found == {"hit_share": 0.5, "cached_tokens": 6, "cached_again_tokens": 5, "evicted_blocks": 7}


def test_lost_tokens_of_requests_that_end_are_not_recomputed() -> None:
    """0 is preempted with 6 of 7 tokens in the cache and computed again; 1 is preempted with 3, and ended by the policy; 2 is rejected."""

    class Moody:
        def plan(self, view: View) -> Plan:
            plan, known = view.plan(), {request.id: request for request in (*view.running, *view.waiting)}
            if view.iteration == 2 and known[1] in view.running:
                plan.preempt(known[0])
                plan.preempt(known[1])
            elif view.iteration == 2:
                plan.reject(known[1], "enough")
                plan.reject(known[2], "too late")
            for id_ in (0, 1):
                if id_ in known and not plan.plan.preempt and not (id_ and view.iteration == 2):
                    plan.add(known[id_])
            return plan.build()

    engine = make_engine(Moody(), LIMITS, asynchronous=False)
    requests = [Request(0, 5, 4), Request(1, 2, 9), Request(2, 3, 1)]
    engine.submit(requests)
    run = summarize(engine.run(), num_blocks=100, max_batch=4)["run"]
    assert [(each.num_lost_tokens, each.num_recomputed_tokens) for each in requests] == [(6, 6), (3, 0), (0, 0)]
    assert (run["lost_tokens"], run["recomputed_tokens"], run["recomputed_share"]) == (9, 6, 6 / (5 + 2 + 2 + 7 + 1))
    assert (run["rejected_requests"], run["broken_off_requests"], run["preemptions"]) == (1, 1, 2)


@pytest.mark.parametrize(("leased", "after_moves", "after_lost_leases"), [(0, 68, 0), (96, 4, 64)])
def test_what_is_computed_again_was_lost_to_what_took_it_last(
    leased: int, after_moves: int, after_lost_leases: int
) -> None:
    """A prompt of 100: 60 tokens are lost to a preemption and all 100 to a move, after which 32 are found there.

    32 to 80 come again; a preemption takes 80, and all come again: 0 to 80 for the preemption, 80 to 100 for the move. A lost lease has 96 of the move's.
    """
    request, record = Request(0, 100, 20), RunRecord()
    request.lose(60)
    request.resume(0)
    request.count_recomputed(100)
    request.move(100)
    if leased:
        request.lose_lease(leased)
    request.resume(32)
    request.lose(80)
    request.resume(0)
    request.count_recomputed(110)
    request.finish_reason, request.finished_at = FinishReason.CANCELLED, 1.0
    record.requests, record.prefilled_on = [request], {0: 0}
    run = summarize(record, num_blocks=1, max_batch=1)["run"]
    parts = [run[f"recomputed_after_{cause}"] for cause in ("preemptions", "moves", "lost_leases")]
    assert parts == [60 + 80, after_moves, after_lost_leases]
    assert run["recomputed_tokens"] == sum(parts) == 60 + 48 + 100


@pytest.mark.parametrize(("timeout", "requests_per_second"), [(None, 1 / 7), (0.5, 0.0)], ids=["one", "all"])
def test_what_was_computed_for_clients_that_left_takes_time(timeout: float | None, requests_per_second: float) -> None:
    """Request 0 ends at 1 s, unless its client leaves; an iteration for request 1 is in flight until 7 s when its client leaves."""
    engine = make_engine(PrefillFirst(), LIMITS)
    engine.submit([Request(0, 4, 1 if timeout is None else 5, timeout=timeout), Request(1, 5, 20, timeout=6.5)])
    found = summarize(engine.run(), num_blocks=100, max_batch=4)
    assert found["run"]["counted_seconds"] == found["run"]["seconds"] == 7.0
    assert found["throughput"]["requests_per_second"] == pytest.approx(requests_per_second)
    assert found["iterations"]["batch_requests"] >= 1


def test_a_policy_that_lets_its_first_requests_wait_does_not_shorten_the_run() -> None:
    """Request 0 arrives at 0 s and is planned at 5 s; its four tokens take 1 s each."""

    class Waiting(PrefillFirst):
        def plan(self, view: View) -> Plan:
            return super().plan(view) if view.now >= 5 else view.plan().build(wake_at=5.0)

    engine = make_engine(Waiting(), LIMITS)
    engine.submit([Request(0, 4, 4)])
    found = summarize(engine.run(), num_blocks=100, max_batch=4)
    assert found["run"]["seconds"] == found["run"]["counted_seconds"] == 9.0
    assert found["throughput"]["decode_tokens_per_second"] == pytest.approx(4 / 9)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=20), st.integers(0, 60), st.integers(0, 30))
def test_busy_seconds_are_the_length_of_the_union(spans: list[tuple[int, int]], start: int, length: int) -> None:
    spans = [(begin, begin + duration) for begin, duration in spans]  # replicas have them in any order
    window = Window(start, start + length)
    covered = {second for begin, end in spans for second in range(begin, end)}
    expected = len(covered & set(range(start, start + length)))
    begins, ends = (np.array([span[side] for span in spans], np.float64) for side in (0, 1))
    assert busy_seconds(begins, ends, window) == expected


def test_replicas_are_active_on_average() -> None:
    """The last token comes at 4 s. Device 0 computes in the second second, device 1 in the last.

    Host 0 plans in the first and takes in tokens in the third, while host 1 plans. Each iteration fills its replica's batch of 1 or 4.
    """
    record = RunRecord()
    for replica, begin in enumerate((0.0, 2.0)):
        planned, launched, received, done = begin + np.arange(4.0)
        times = (planned, launched, launched, received, done, launched, received)
        batch = (1 + 3 * replica, 4, 0, 0, 1, 0, 1, 0, 1)
        record.add_step(StepRecord(replica, *times, *batch, note=""), np.array([replica]))
        request = Request(replica, 4, 1)
        request.finished_at, request.admitted_at, request.finish_reason = received, planned, FinishReason.LENGTH
        record.requests.append(request)
    record.replicas, record.replica_of, record.pools = [0, 1], {0: 0, 1: 1}, ("small", "large")
    found = summarize(record, num_blocks=100, max_batch=np.array([1, 4]), num_replicas=2)
    assert found["run"]["counted_seconds"] == 4.0
    shares = [part["iterations"] for part in (found, *found["pools"].values())]
    assert [part["device_active_share"] for part in shares] == [1 / 4, 1 / 4, 1 / 4]
    assert [part["host_active_share"] for part in shares] == [(2 + 1) / 4 / 2, 2 / 4, 1 / 4]
    assert [part["batch_requests"] for part in shares] == [2.5, 1.0, 4.0]
    assert [part["batch_occupancy"] for part in shares] == [1.0, 1.0, 1.0]


def test_a_replica_is_active_for_a_share_of_its_life() -> None:
    """Replica 1 is there for 2 of 4 s, and computes for half of them; replica 0 computes for one of its 4 s."""
    record = RunRecord()
    for replica, begin in enumerate((0.0, 3.0)):
        times = (begin, begin, begin, begin + 1, begin + 1, begin, begin + 1)
        record.add_step(StepRecord(replica, *times, 1, 4, 0, 0, 1, 0, 1, 0, 1, note=""), np.array([replica]))
        request = Request(replica, 4, 1)
        request.finished_at, request.admitted_at, request.finish_reason = begin + 1, begin, FinishReason.LENGTH
        record.requests.append(request)
    record.replicas, record.replica_of, record.lives = [0, 1], {0: 0, 1: 1}, [Life(0, 0.0, 0.0), Life(1, 2.0, 2.0)]
    found = summarize(record, num_blocks=100, max_batch=4, num_replicas=2)
    assert found["iterations"]["device_active_share"] == (1 + 1) / (4 + 2)


class Varying:
    """Iterations of uneven length."""

    def predict(self, shape: BatchShape) -> float:
        return 0.1 + 0.013 * shape.num_tokens + 0.001 * shape.decode_context


@st.composite
def workloads(draw: st.DrawFn) -> Listed:
    lengths = st.tuples(st.integers(1, 30), st.integers(1, 12), st.floats(0, 5), st.integers(0, 6))
    drawn = [*enumerate(draw(st.lists(lengths, min_size=1, max_size=12)))]
    requests = [Request(id_, *lengths, arrival_time=0.0 if at else time) for id_, (*lengths, time, at) in drawn]
    return Listed(requests, {id_: at for id_, (*_, at) in drawn})


@settings(max_examples=40)
@given(workloads(), st.integers(0, 4), st.integers(0, 4), st.booleans(), st.integers(12, 40))
def test_figures_equal_plain_loops(
    arrivals: Listed, warmup: int, drain: int, asynchronous: bool, num_blocks: int
) -> None:
    executor = SimExecutor(Varying(), HostTime(0.05))
    policy, asked = PrefillFirst(), dict[int, float]()  # when it was first asked for each iteration
    plan = policy.plan
    policy.plan = lambda view: (asked.setdefault(view.iteration, view.now), plan(view))[1]  # type: ignore[method-assign]
    engine = Engine(policy, executor, LIMITS, Varying(), num_blocks=num_blocks, block_size=4, asynchronous=asynchronous)
    engine.attach(arrivals)
    record = engine.run()
    summary = summarize(record, num_blocks=num_blocks, max_batch=4, warmup_requests=warmup, drain_requests=drain)
    for group, expected in by_loops(record, arrivals, asked, num_blocks, warmup, drain).items():
        found = summary[group]
        assert {key: found[key] for key in expected} == pytest.approx(expected, nan_ok=True), group


def by_loops(
    record: RunRecord, arrivals: Listed, asked: dict[int, float], num_blocks: int, warmup: int, drain: int
) -> dict[str, dict[str, float]]:
    """The same figures, a request and a token at a time. asked: when the policy was first asked for an iteration, perhaps in vain."""
    times: dict[int, list[float]] = {}
    for id_, time in zip(*(column.tolist() for column in record.tokens()), strict=True):
        times.setdefault(id_, []).append(time)
    ends = sorted(times[request.id][-1] for request in record.requests)
    start = ends[min(warmup, len(ends)) - 1] if warmup else record.steps[0].planned_at
    end = max(ends[len(ends) - drain - 1], start) if drain < len(ends) else start
    inside = [request for request in record.requests if start < times[request.id][-1] <= end]
    gaps = [b - a for each in times.values() for a, b in pairwise(each) if start < b <= end]
    prompts = sum(request.num_prompt_tokens for request in record.requests if start < times[request.id][0] <= end)
    tokens = sum(start < time <= end for each in times.values() for time in each)
    seconds = end - start or math.nan
    steps = [step for step in record.steps if start < step.received_at <= end]

    def arrival(request: Request) -> float:
        planned = {**{step.iteration: step.planned_at for step in record.steps}, **asked}
        by_iteration = planned.get(at, math.inf) if (at := arrivals.iterations.get(request.id)) else 0.0
        assert request.admitted_at is not None
        return min(max(request.arrival_time, by_iteration), request.admitted_at)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    return {
        "run": {"counted_requests": len(inside), "counted_seconds": end - start},
        "throughput": {
            "prefill_tokens_per_second": prompts / seconds,
            "decode_tokens_per_second": tokens / seconds,
            "requests_per_second": len(inside) / seconds,
        },
        "ttft_seconds": {"mean": mean([times[request.id][0] - arrival(request) for request in inside])},
        "end_to_end_seconds": {"mean": mean([times[request.id][-1] - arrival(request) for request in inside])},
        "tbt_seconds": {"mean": mean(gaps), "p50": float(np.median(gaps)) if gaps else math.nan},
        "longest_gap_seconds": {
            "mean": mean([max(np.diff(times[each.id])) for each in inside if each.max_new_tokens > 1])
        },
        "iterations": {
            "batch_requests": mean([step.num_requests for step in steps]),
            "kv_use_mean": mean([step.kv_blocks_used / num_blocks for step in steps]),
            "device_active_share": sum(max(min(step.ended, end) - max(step.started, start), 0) for step in record.steps)
            / seconds,
        },
    }
