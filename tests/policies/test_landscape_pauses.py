"""Published policies that rank running requests again, or prompts by relative slack, at their limits, as in `test_landscape_edges`."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from unit_machine import golden, running, view_of

from cbatch import SLO, BatchShape, Plan, Refusal, Request, View
from policies.lars import LARS
from policies.ltr import LTR
from policies.mlfq import MLFQ
from policies.predictors import Oracle
from policies.shared.falling_queue import FallingQueue
from policies.shared.waiting import WaitingQueue

# -- mlfq and ltr ---------------------------------------------------------------------------------------------------------------


def test_an_iteration_is_charged_with_its_predicted_time() -> None:
    """A second, and half a second per token of a decode's context: A's take 1 (its prompt), 2.5, 3, 3.5 and so on, B's 1.5, 2, ...

    Above the quanta of 2, 4 and 8 s are A's 1 + 2.5 and 3 + 3.5, and B's 1.5 + 2 and 2.5 + 3. A prompt has no context when it joins.
    """

    def seconds(shape: BatchShape) -> float:
        return 1 + shape.decode_context / 2 + 5 * sum(context for _, context in shape.chunks)

    policy = MLFQ(quantum=2, promote_after=1000)
    found = golden(policy, "A 2/6 @0, B 1/6 @0", batch=1, seconds=seconds, limits={"max_running": 8})
    assert "".join(entry[0] for entry in found.schedule.split(" | ")) == "AABBAABBAABB"


@pytest.mark.parametrize(("coming", "added"), [(True, True), (False, False)])
def test_one_that_waits_for_blocks_in_flight_preempts_none(coming: bool, added: bool) -> None:
    """Those behind it may go on, unless none is left to preempt."""
    asked: list[int] = []
    plan: Any = SimpleNamespace(add=lambda request, **_: 0, refusal=Refusal.BLOCKS, plan=Plan())
    plan.wait_for_blocks = lambda request, tokens: asked.append(tokens) or coming
    queue = WaitingQueue(lambda request: 0)
    assert queue.add_by_preempting(Request(0, 4, 1), plan, view_of(running=[])) is added
    assert asked == [4]


def test_none_is_preempted_for_what_other_than_blocks_is_short_of() -> None:
    plan: Any = SimpleNamespace(add=lambda request, **_: 0, refusal=Refusal.TOKENS, plan=Plan())
    assert WaitingQueue(lambda request: 0).add_by_preempting(
        Request(0, 4, 1), plan, view_of(running=[Request(1, 1, 1)])
    )


def test_ltr_ends_its_plan_at_a_request_that_waits_for_blocks_in_flight() -> None:
    """It ranks before the running one, which pauses."""
    policy, waiting, under_way = LTR(Oracle()), Request(0, 4, 1), Request(1, 1, 9)
    for request in (waiting, under_way):
        policy.on_arrival(request)
    tried: list[Request] = []
    plan: Any = SimpleNamespace(refusal=Refusal.BLOCKS, plan=Plan(), build=Plan)
    plan.add, plan.wait_for_blocks = lambda request, **_: tried.append(request) or 0, lambda *_: True
    view = view_of(waiting=[waiting], running=[under_way], iteration=0, plan=lambda: plan)
    view.is_waiting = view.waiting.__contains__
    policy.plan(view)
    assert tried == [waiting]


def test_a_starvation_of_one_iteration_is_taken() -> None:
    assert (LTR(Oracle(), starvation=1, period=1).starvation, MLFQ(quantum=1e-9, promote_after=1e-9).quantum) == (
        1,
        1e-9,
    )


# -- lars ---------------------------------------------------------------------------------------------------------------------


def by_tokens(shape: BatchShape) -> float:
    """Ten milliseconds per token."""
    return shape.num_tokens / 100


def test_a_prompt_that_was_taken_waits_no_more() -> None:
    """Half a second is five tokens: B, of less slack, fills the first iteration; beside its decode A's three have room."""
    found = golden(LARS(target=0.5), "A 3/1 @0, B 5/2 @0", seconds=lambda shape: shape.num_tokens / 10)
    assert found.schedule == "B5 | B1 A3"


def test_a_request_that_ends_while_it_waits_leaves_the_queue() -> None:
    """Preempted while its last token was in flight."""
    policy, preempted = LARS(), running(0, 10, 5)
    policy._whole[preempted] = 1.0
    policy._wait(preempted)
    policy.on_finish(preempted)
    assert policy._waiting.least(0.0, 1) == []


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


def test_of_equal_slack_the_prompt_under_way_goes_first() -> None:
    """Both 2: half of P's prompt, 1 s of 2, is left 5 s before it is due, all of A's, 1 s, 3 s before. A was submitted first."""
    policy, a, p = LARS(), running(0, 10, 5, slo=SLO(ttft=3)), running(1, 10, 5, slo=SLO(ttft=5))
    policy._whole = {a: 1.0, p: 2.0}
    a.computed, a.ready, p.computed, p.ready = 0, 10, 5, 5
    policy._wait(a)
    plan: Any = SimpleNamespace(can_admit=True)
    assert policy._by_slack(plan, view_of(prefilling=[p], now=0.0)) == [p, a]


def test_a_prompt_that_takes_the_target_time_is_not_long() -> None:
    """It has no context when it arrives, which would cost seconds; a long one would be cut."""
    found = golden(
        LARS(target=1.0),
        "A 100/1 @0",
        seconds=lambda shape: by_tokens(shape) + sum(context for _, context in shape.chunks),
    )
    assert found.schedule == "A100"


@pytest.mark.parametrize("number", [0, 1, 7, 8, 9, 100])
def test_requests_of_the_least_keys_while_all_fall(number: int) -> None:
    """So many at first, and each second another, while others leave; two are asked for."""
    queue, keys, random = FallingQueue(), dict[Request, tuple[int, int]](), Random(number)
    for now in range(-number, 60):
        request = Request(now + number, 1, 1)
        keys[request] = random.randint(0, 40), random.randint(0, 3)
        queue.push(request, *keys[request])
        if now >= 0 and random.random() < 0.7:
            del keys[gone := random.choice([*keys])]
            queue.discard(gone)
        if now >= 0 or now == -1:
            found = queue.least(now, 2)
            assert sorted(key for key, _ in found) == sorted(start - now * rate for start, rate in keys.values())[:2]
            assert all(key == keys[each][0] - now * keys[each][1] for key, each in found)


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
