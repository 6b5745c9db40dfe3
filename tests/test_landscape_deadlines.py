"""Published policies of deadlines and of pauses where memory, batch or a setting is at its limit, as in `test_landscape_edges`."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from unit_machine import golden, running, view_of

from cbatch import SLO, BatchShape, ConfigError, Limits, Plan, Refusal, Request, StepRecord, View
from policies.chunking import Fixed, Slack
from policies.deadlines import deadline
from policies.lars import LARS
from policies.ltr import LTR
from policies.mlfq import MLFQ
from policies.predictors import Oracle
from policies.qoserve import QoServe
from policies.slai import Slai
from policies.waiting import WaitingQueue

EVER = float("inf")
PAUSES: dict[str, Any] = {"batch": 2, "limits": {"max_running": 8}}


# -- slai -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "third"), [("spf", "A1 C2 B1"), ("fcfs", "A1 B3")])
def test_waiting_prompts_by_length_or_by_arrival(order: str, third: str) -> None:
    found = golden(Slai(4, order=order, tbt=9), "A 9/1 @0, B 4/1 @1, C 2/1 @2", tokens=4)
    assert found.schedule.split(" | ")[:3] == ["A4", "A4", third]


def test_the_earlier_arrival_counts_not_the_earlier_number() -> None:
    found = golden(Slai(4, order="fcfs", tbt=9), "A 9/1 @0, C 4/1 @2, B 4/1 @1", tokens=4)
    assert found.schedule.split(" | ")[:3] == ["A4", "A4", "A1 B3"]


def test_paying_requests_first() -> None:
    priority = {"A": 0, "B": 5, "C": 0}
    found = golden(Slai(4, tbt=9, by_priority=True), "A 3/1 @0, B 4/1 @0, C 2/1 @0", tokens=4, priority=priority)
    assert found.schedule == "B4 | C2 A2 | A1"


def test_decodes_that_can_wait_get_what_the_budget_leaves() -> None:
    found = golden(Slai(3, tbt=9, offset=0), "A 5/2 @0, B 2/2 @0", tokens=10)
    assert found.schedule == "B2 A1 | A3 | A1 B1 | A1"


def test_prompts_under_way_come_in_the_order_of_their_last_chunk() -> None:
    """B and A had their last chunks in iterations 5 and 3."""
    policy = Slai(4)
    a, b = Request(0, 9, 1), Request(1, 9, 1)
    policy._served = {a: 3, b: 5}
    served: list[Request] = []
    plan = SimpleNamespace(num_tokens=0, plan=Plan(), build=Plan, add=lambda request, *_, **__: served.append(request))
    view = view_of(
        prefilling=[b, a],
        decoding=[],
        now=0.0,
        plan=lambda: plan,
        running=[a, b],
        kv=SimpleNamespace(num_free=9, num_blocks=9),
        ready_decodes=lambda at_most: ([], 0),
    )
    policy.plan(view)
    assert served == [a, b]


def test_a_decode_whose_time_has_come_preempts_the_last_prompt_else_itself() -> None:
    """B's prompt reserves 7 of 9 tokens; A must decode at 2 s. Below, B has decoded already: A, which comes first, goes."""
    found = golden(Slai(4, tbt=1, offset=0), "A 2/6 @0, B 7/1 @1", memory=9, tokens=4)
    assert found.schedule == "A2 | B4 | A1 pre B | A1 | A1 | A1 | A1 | B4 | B3"
    found = golden(Slai(8, tbt=1, offset=0), "A 2/6 @0, B 5/2 @1", memory=8, tokens=8)
    assert found.schedule == "A2 | B5 A1 | B1 pre A | A4 | A1 | A1 | A1"


def step(launched: float, received: float, prefill: int = 0) -> StepRecord:
    values = dict.fromkeys(StepRecord._fields, 0) | {"launched_at": launched, "received_at": received, "note": ""}
    return StepRecord(**{**values, "num_prefill_tokens": prefill})


@pytest.mark.parametrize(("free", "offset"), [(5, 5.0), (4, 10.0)])
def test_the_last_schedulable_time_is_five_mean_iterations_early_or_ten_from_96_percent_of_the_cache(
    free: int, offset: float
) -> None:
    """Iterations of 2 s and, as it was launched before the first had ended, of 1 s: 1.5 s on average."""
    policy, decode = Slai(tbt=100.0), running(0, 5, 9, 1)
    for record in (step(0.0, 2.0), step(1.0, 3.0)):
        policy.on_step(record)
    view = view_of(decoding=[decode], kv=SimpleNamespace(num_free=free, num_blocks=100), now=7.0)
    policy._set_times(view)
    assert policy._last.times == {decode: pytest.approx(7 + 100 - offset * 1.5)}
    own = running(1, 5, 9, 1, slo=SLO(tbt=30.0))
    view.decoding, view.now = [decode, own], 8.0  # type: ignore[assignment, misc]
    policy._set_times(view)
    assert policy._last.times[own] == pytest.approx(8 + 30 - offset * 1.5)
    assert policy._last.times[decode] == pytest.approx(7 + 100 - offset * 1.5), "until it has its next token"
    fixed = Slai(tbt=100.0, offset=0.0)
    fixed._set_times(view)
    assert fixed._last.times[decode] == 108.0


def test_slai_needs_an_objective_above_0() -> None:
    with pytest.raises(ConfigError, match="tbt=0"):
        Slai(tbt=0)


def test_of_equal_times_the_earlier_submitted_decodes_first() -> None:
    """Also where the other one, whose prompt is shorter, was admitted before it."""
    assert golden(Slai(8, tbt=5, offset=0), "A 2/2 @0, B 1/2 @0").schedule == "B1 A2 | A1 B1"
    found = golden(Slai(1, tbt=5, offset=0), "A 1/2 @0, B 1/2 @0, C 1/2 @0")
    assert found.schedule == "A1 | B1 | C1 | A1 | B1 | C1"


# -- qoserve ------------------------------------------------------------------------------------------------------------------


def test_what_has_no_room_blocks_those_behind_it() -> None:
    """A reserves 7 of 20 tokens, B would 18; C would fit and waits."""
    slos = {name: SLO(ttft=seconds) for name, seconds in (("A", 10.0), ("B", 20.0), ("C", 30.0))}
    found = golden(QoServe(Fixed(20), Oracle(), "edf"), "A 5/2 @0, B 9/9 @0, C 1/1 @0", memory=20, slo=slos)
    assert found.schedule.startswith("A5 | A1 | B9 C1 | ")


def test_prompts_that_have_begun_share_the_chunk_where_the_next_has_no_room() -> None:
    """B overtakes A at 1 s; at 2 s W, which is due first, would need 29 of the 40 tokens, and A and B hold 35."""
    slos = {name: SLO(ttft=seconds) for name, seconds in (("A", 90.0), ("B", 60.0), ("W", 30.0))}
    requests = "A 20/1 @0, B 13/1 @1, W 9/20 @2"
    found = golden(QoServe(Fixed(10), Oracle(), "edf"), requests, memory=40, slo=slos)
    assert found.schedule.startswith("A10 | B10 | B3 A7 | A3 | W9 | ")


def test_first_come_first_served_ignores_deadlines() -> None:
    slos = {"A": SLO(ttft=9), "B": SLO(ttft=2)}
    assert golden(QoServe(Fixed(4), Oracle(), "fcfs"), "A 5/1 @0, B 2/1 @0.0", slo=slos).schedule == "A4 | A1 B2"


def test_the_throughput_of_prompts_is_smoothed() -> None:
    """8,500 at first. 1,700 tokens in 0.1 s are 17,000 per second, of which half a percent counts."""
    policy = QoServe(Fixed(4), Oracle())
    policy.on_step(step(1.0, 1.1, 1700))
    assert policy._times.prompt_rate == pytest.approx(0.995 * 8500 + 0.005 * 17000)
    known = policy._times.prompt_rate
    policy.on_step(step(1.0, 1.2))  # no prompt; it ends at 1.2
    assert policy._times.prompt_rate == known
    policy.on_step(step(1.1, 1.3, 1700))  # launched early: it took from 1.2 to 1.3
    assert policy._times.prompt_rate == pytest.approx(0.995 * known + 0.005 * 17000)
    policy.on_step(step(1.0, 1.3, 1700))  # no time at all
    assert policy._times.prompt_rate == pytest.approx(0.995 * known + 0.005 * 17000)


@pytest.mark.parametrize(
    ("slo", "misses"),
    [
        (SLO(ttft=3.0), False),  # due at 10: 8 + 16 tokens at 8 per second are exactly in time
        (SLO(ttft=2.9), True),
        (SLO(total=15.0), False),  # due at 22, and 30 tokens of output take 12 s
        (SLO(total=14.9), True),
        (SLO(), False),  # due at 1807
    ],
)
def test_a_prompt_is_late_that_cannot_end_before_its_deadline(slo: SLO, misses: bool) -> None:
    policy, request = QoServe(Fixed(4), Oracle()), Request(0, 16, 30, arrival_time=7.0, slo=slo)
    policy._times.prompt_rate = 8.0
    waits = view_of(now=8.0, is_waiting=lambda request: True)
    assert policy._misses(request, waits) is misses
    assert deadline(request) == 7 + (slo.ttft or slo.total or 1800)
    assert not policy._misses(request, view_of(now=8.0, is_waiting=lambda request: False))
    policy._relegated.add(request)
    assert not policy._misses(request, waits), "once is enough"


def test_qoserve_checks_its_chunks() -> None:
    with pytest.raises(Exception, match="chunk"):
        QoServe(Fixed(50), Oracle()).check(Limits(8, 40, 100))


# -- slack --------------------------------------------------------------------------------------------------------------------

SIZES = [128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2552]
"""Those of the authors' code."""


def chunk(left: float, decodes: int = 1, most: int = 4000, free: int = 99_999) -> int:
    """The chunk where the first of the decodes is due in `left` seconds; a token takes 1 ms, and a fifth is added for safety."""
    due = [running(id_, 5, 9, 1, slo=SLO(ttft=1e-9, tbt=left + 7.0 * id_)) for id_ in range(decodes)]
    selector = Slack()
    view = view_of(
        decoding=due,
        now=100.0,
        limits=Limits(64, most, 10_000),
        kv=SimpleNamespace(num_free=free // 10 if free % 10 == 0 else free, block_size=10 if free % 10 == 0 else 1),
        cost=SimpleNamespace(predict=lambda shape: 1e-3 * shape.num_tokens),
    )
    return selector.num_tokens(view, decodes)


@pytest.mark.parametrize(("size", "smaller"), list(zip(SIZES[1:], SIZES, strict=False)))
def test_the_largest_size_that_ends_in_time(size: int, smaller: int) -> None:
    assert (chunk(1.2e-3 * size + 1e-6), chunk(1.2e-3 * size - 1e-6)) == (size - 1, smaller - 1)


def test_the_smallest_size_is_taken_even_if_it_is_late_and_the_largest_without_decodes() -> None:
    assert chunk(1e-9) == 127
    assert chunk(9.0, decodes=0) == 2552 and chunk(9.0, decodes=0, most=2047) == 1792
    assert chunk(9.0, decodes=0, most=100) == 100, "no size fits into an iteration"
    assert chunk(1e-9, decodes=40) == 128 - 40, "the first that is due counts"


def test_with_less_than_32000_tokens_free_an_iteration_has_at_most_512() -> None:
    assert (chunk(9.0, free=31_999), chunk(9.0, free=32_000)) == (511, 2551)


@pytest.mark.parametrize(
    ("slo", "due"),
    [
        (SLO(), 12.0 + 3 * 0.4),  # from its first token
        (SLO(ttft=1.0), 12.0 + 3 * 0.05),  # due at 11, late
        (SLO(ttft=4.0), 14.0 + 3 * 0.05),  # early: the objective counts
        (SLO(ttft=4.0, tbt=0.1), 14.0 + 3 * 0.1),
        (SLO(tbt=0.1), 12.0 + 3 * 0.1),
    ],
)
def test_when_the_next_token_is_due(slo: SLO, due: float) -> None:
    """It arrived at 10 s; of its tokens the first was there at 12 s, the third at 12.5 s."""
    selector, request = Slack(), running(0, 5, 9, 1, arrival_time=10.0, slo=slo)
    view: Any = view_of(
        decoding=[request],
        now=12.0,
        limits=Limits(64, 4000, 10_000),
        kv=SimpleNamespace(num_free=99_999, block_size=1),
        cost=SimpleNamespace(predict=lambda shape: 0.0),
    )
    selector.num_tokens(view, 1)
    view.now, request.total = 12.5, request.total + 2
    for left, size in ((due - 12.5, 2552), (due - 12.5 - 1e-6, 128)):
        view.cost = SimpleNamespace(predict=lambda shape, needed=due - 12.5 - 5e-7, left=left: needed / 1.2)
        view.now = due - left
        assert selector.num_tokens(view, 1) == size - 1
    selector.observe(request)
    assert not [kept for kept in vars(selector).values() if kept]


# -- mlfq and ltr ---------------------------------------------------------------------------------------------------------------


def test_a_level_has_twice_the_quantum_of_the_one_above() -> None:
    """Quanta of 1, 2 and 4 s are used up by 2, 3 and 5 iterations of a second: more than the quantum."""
    found = golden(MLFQ(quantum=1, promote_after=1000), "A 1/9 @0, B 1/9 @0", batch=1, limits={"max_running": 8})
    order = "".join(entry[0] for entry in found.schedule.split(" | "))
    assert order == "AABBAAABBBAAAABBBB"


def test_an_iteration_is_charged_with_its_predicted_time() -> None:
    """A second, and half a second per token of a decode's context: A's take 1 (its prompt), 2.5, 3, 3.5 and so on, B's 1.5, 2, ...

    Above the quanta of 2, 4 and 8 s are A's 1 + 2.5 and 3 + 3.5, and B's 1.5 + 2 and 2.5 + 3. A prompt has no context when it joins.
    """

    def seconds(shape: BatchShape) -> float:
        return 1 + shape.decode_context / 2 + 5 * sum(context for _, context in shape.chunks)

    policy = MLFQ(quantum=2, promote_after=1000)
    found = golden(policy, "A 2/6 @0, B 1/6 @0", batch=1, seconds=seconds, limits={"max_running": 8})
    assert "".join(entry[0] for entry in found.schedule.split(" | ")) == "AABBAABBAABB"


def test_mlfq_fills_the_batch() -> None:
    found = golden(MLFQ(quantum=100), "A 1/2 @0, B 1/2 @0, C 1/2 @0", **PAUSES)
    assert found.schedule == "A1 B1 | A1 B1 | C1 | C1"


def test_mlfq_preempts_the_tail_of_the_lowest_queue() -> None:
    """8 tokens: in iteration 1 C pauses, in 2 it makes room for A and B, and in 3 B for A, which lets C in."""
    requests = "A 2/4 @0, B 2/4 @0, C 2/2 @0"
    found = golden(MLFQ(quantum=100, promote_after=1000), requests, batch=8, memory=8, limits={"max_running": 8})
    assert found.schedule == "A2 B2 C2 | A1 B1 | A1 B1 pre C | A1 C3 pre B | B5"


@pytest.mark.parametrize(("coming", "added"), [(True, True), (False, False)])
def test_one_that_waits_for_blocks_in_flight_preempts_none(coming: bool, added: bool) -> None:
    """Those behind it may go on, unless none is left to preempt."""
    asked: list[int] = []
    plan: Any = SimpleNamespace(add=lambda request, **_: 0, refusal=Refusal.BLOCKS, plan=Plan())
    plan.wait_for_blocks = lambda request, tokens: asked.append(tokens) or coming
    queue = WaitingQueue(lambda request: 0)
    assert queue.add_by_preempting(Request(0, 4, 1), plan, view_of(running=[])) is added
    assert asked == [4]


def test_the_running_go_on_where_no_waiting_request_finds_a_place() -> None:
    """C ranks first and there are two places."""
    found = golden(LTR(Oracle(), EVER), "A 1/4 @0, B 1/4 @0, C 1/1 @1", batch=2)
    assert found.schedule == "A1 B1 | A1 B1 | A1 B1 | A1 B1 | C1"


def test_ltr_preempts_from_the_lowest_rank_and_lets_none_overtake() -> None:
    """Outputs of 3, 4 and 5 tokens. Iteration 1 takes C's block for A, 2 takes B's for A, which lets C in; B returns in 3."""
    found = golden(LTR(Oracle(), EVER), "A 3/3 @0, B 6/4 @0, C 1/5 @0", memory=10, batch=8)
    assert found.schedule == "A3 B6 C1 | A1 pre C | A1 C2 pre B | B7 C1 | B1 pre C | B1 | C4 | C1"
    found = golden(LTR(Oracle(), EVER), "A 5/3 @0, B 6/4 @0, C 1/5 @0", memory=10, batch=8)
    assert found.schedule.startswith("A5 | A1 | A1 | B6 C1 | "), "C would fit, and waits behind B"


def test_ltr_stops_at_the_first_that_does_not_fit_into_the_iteration() -> None:
    """Of 4 tokens one is left beside A's prompt: B's does not fit, and C, of a longer output, pauses."""
    found = golden(LTR(Oracle(), EVER), "C 1/5 @0, A 3/1 @1, B 3/2 @1", tokens=4)
    assert found.schedule == "C1 | A3 | B3 C1 | B1 C1 | C1 | C1"


@pytest.mark.parametrize(("period", "order"), [(1, "BBBABBBA"), (2, "BBBAABBB"), (3, "BBBAAABB")])
def test_a_promotion_lasts_for_a_number_of_iterations(period: int, order: str) -> None:
    """A is promoted when it was left out of three, and goes before B as long as that lasts."""
    found = golden(LTR(Oracle(), 3, period), "A 1/9 @0, B 1/8 @0", batch=1, limits={"max_running": 2})
    assert "".join(entry[0] for entry in found.schedule.split(" | "))[:8] == order


def test_a_promoted_request_is_no_victim_of_one_that_is_not() -> None:
    """A, of the longest output, is promoted in iteration 2, C in 4: then B, shorter than A, leaves. In 6 all are promoted."""
    found = golden(LTR(Oracle(), 2, period=9), "A 2/7 @0, B 2/5 @0, C 2/5 @0", memory=11, **PAUSES)
    assert found.schedule == ("B2 C2 | B1 C1 | A2 B1 | A1 B1 | C1 A1 pre B | C1 A1 | B6 pre A | C1 | A6 | A1 | A1")


def test_a_starvation_of_one_iteration_is_taken() -> None:
    assert (LTR(Oracle(), starvation=1, period=1).starvation, MLFQ(quantum=1e-9, promote_after=1e-9).quantum) == (
        1,
        1e-9,
    )


# -- lars ---------------------------------------------------------------------------------------------------------------------


def by_tokens(shape: BatchShape) -> float:
    """Ten milliseconds per token."""
    return shape.num_tokens / 100


def test_chunks_of_an_iteration_share_its_target_time() -> None:
    found = golden(LARS(target=1.0), "A 60/1 @0, B 60/1 @0", seconds=by_tokens, tokens=1000)
    assert found.schedule == "A60 B40 | B20"


def test_an_iteration_has_one_long_prompt_and_the_short_ones_behind_the_second() -> None:
    """L: 3 s of work, due at 4, relative slack 1/3: two thirds of the second. M: (5 - 3.1) / 3.1 = 0.6; S: 44."""
    slos = {"L": SLO(ttft=4), "M": SLO(ttft=5), "S": SLO(ttft=9)}
    requests = "L 300/1 @0, M 310/1 @0, S 20/1 @0"
    entries = golden(LARS(target=1.0), requests, seconds=by_tokens, tokens=1000, slo=slos).schedule.split(" | ")
    assert entries[0] == "L66 S20" and not [entry for entry in entries if "L" in entry and "M" in entry]


def test_a_long_prompt_that_ends_leaves_no_room_for_another_long_one() -> None:
    """128 tokens take a second. L, 1.75 s of work, due at 2.625 s, has a relative slack of 1/2: 64 tokens of each iteration's 128.

    At 1.5 s it has 32 left. S has less slack then, 0.5625, than M, 0.625, whose share would be 48 tokens of the iteration.
    """
    slos = {"L": SLO(ttft=2.625), "S": SLO(ttft=0.34765625), "M": SLO(ttft=3.5)}
    requests = "L 224/1 @0, S 8/1 @1.25, M 256/1 @1.25"
    found = golden(LARS(target=1.0), requests, seconds=lambda shape: shape.num_tokens / 128, tokens=1000, slo=slos)
    assert found.schedule.startswith("L64 | L64 | L64 | L32 S8 | M")


def test_chunks_leave_time_for_the_context_of_decodes() -> None:
    """A decodes at a context of 21: 21/120 s. Of the second, 1/100 goes to its token, and 0.815 to at most 81 of B's 90."""
    found = golden(
        LARS(target=1.0), "A 20/3 @0, B 90/1 @0.1", seconds=lambda s: s.num_tokens / 100 + s.decode_context / 120
    )
    assert found.schedule.startswith("A20 | A1 B81 | ")


def test_a_prompt_without_room_blocks_the_other_waiting_ones() -> None:
    """A, which is due first, needs 12 of 20 tokens, and R holds 11 and more; B would fit."""
    slos = {"R": SLO(ttft=9), "A": SLO(ttft=13), "B": SLO(ttft=90)}
    found = golden(LARS(target=50.0), "R 10/4 @0, A 12/1 @1, B 2/1 @1", memory=20, slo=slos)
    assert found.schedule == "R10 | R1 | R1 | R1 | A12 B2"


def test_a_waiting_prompt_with_less_slack_goes_before_one_under_way() -> None:
    """L: 10 s, due at 12, slack 0.2: 80 tokens a time, until S comes, half a second long and due at 3.75 s: 0.1 at 3.2 s."""
    slos = {"L": SLO(ttft=12), "S": SLO(ttft=0.75)}
    found = golden(LARS(target=1.0), "L 1000/1 @0, S 50/1 @3", seconds=by_tokens, tokens=1000, slo=slos)
    assert found.schedule.startswith("L80 | L80 | L80 | L80 | S50 L")


def test_the_newest_is_preempted_for_a_decode() -> None:
    found = golden(LARS(target=9.0), "A 2/4 @0, B 2/4 @0", memory=7)
    assert found.schedule == "A2 B2 | A1 B1 | A1 pre B | A1 | B4 | B1"


def test_the_nearest_64_waiting_prompts_are_considered() -> None:
    requests = ", ".join(f"r{number} 1/1 @0" for number in range(70))
    assert len(golden(LARS(target=9.0), requests).schedule.split(" | ")[0].split()) == 64


class Watched(LARS):
    """Says whether each waiting prompt that was admitted had the least relative slack of all."""

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        waiting = [request for request in view.waiting if request in self._whole]
        for request in plan.requests:
            if view.is_waiting(request):
                least = min(self.slack(other, view) for other in waiting)
                self.right = [*getattr(self, "right", []), self.slack(request, view) <= least + 1e-9]
        return plan


def test_of_many_the_least_relative_slack_is_admitted_whatever_left_before() -> None:
    """One request at a time; 150 come at first, and 150 when most of those have left, whose places are cleared then."""
    random = Random(0)
    times = [40.0 * (number // 150) + random.uniform(0, 10) for number in range(300)]
    lines = [f"r{number} {random.randint(1, 40)}/1 @{time:.2f}" for number, time in enumerate(times)]
    slos = {f"r{number}": SLO(ttft=random.uniform(1, 90)) for number in range(0, 300, 2)}
    policy = Watched(target=1.0, ttft=40.0)
    golden(policy, ", ".join(lines), batch=1, seconds=by_tokens, slo=slos)
    assert len(policy.right) == 300 and all(policy.right)
