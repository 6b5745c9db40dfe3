"""Published policies that rank running requests again, or prompts by relative slack: parts that no schedule can show."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from unit_machine import running, view_of

from cbatch import SLO, Plan, Refusal, Request
from policies.lars import LARS
from policies.ltr import LTR
from policies.predictors import Oracle
from policies.shared.falling_queue import FallingQueue
from policies.shared.waiting import WaitingQueue


@pytest.mark.parametrize(
    ("refusal", "running", "coming", "added"),
    [
        (Refusal.BLOCKS, [], True, True),  # those behind it may go on
        (Refusal.BLOCKS, [], False, False),  # none is left to preempt
        (Refusal.TOKENS, [Request(1, 1, 1)], False, True),  # blocks are not what is short
    ],
)
def test_one_that_waits_for_blocks_in_flight_preempts_none(
    refusal: Refusal, running: list[Request], coming: bool, added: bool
) -> None:
    asked: list[int] = []
    plan: Any = SimpleNamespace(add=lambda request, **_: 0, refusal=refusal, plan=Plan())
    plan.wait_for_blocks = lambda request, tokens: asked.append(tokens) or coming
    queue = WaitingQueue(lambda request: 0)
    assert queue.add_by_preempting(Request(0, 4, 1), plan, view_of(running=running)) is added
    assert asked == [4] * (refusal is Refusal.BLOCKS)


def test_ltr_ends_its_plan_at_a_request_that_waits_for_blocks_in_flight() -> None:
    """It ranks before the running one, which pauses."""
    policy, waiting, under_way = LTR(Oracle()), Request(0, 4, 1), Request(1, 1, 9)
    for request in (waiting, under_way):
        policy.on_arrival(request)
        policy.on_wait(request)
    tried: list[Request] = []
    plan: Any = SimpleNamespace(refusal=Refusal.BLOCKS, plan=Plan(), build=Plan)
    plan.add, plan.wait_for_blocks = lambda request, **_: tried.append(request) or 0, lambda *_: True
    view = view_of(waiting=[waiting], running=[under_way], iteration=0, plan=lambda: plan)
    view.is_waiting = view.waiting.__contains__
    policy.plan(view)
    assert tried == [waiting]


def test_a_request_that_ends_while_it_waits_leaves_the_queue() -> None:
    """Preempted while its last token was in flight."""
    policy, preempted = LARS(), running(0, 10, 5)
    policy._waiting.push(preempted, 1.0, 1.0)
    policy.on_finish(preempted)
    assert policy._waiting.least(0.0, 1) == []


def test_of_equal_slack_the_prompt_under_way_goes_first() -> None:
    """Both 2: half of P's prompt, 1 s of 2, is left 5 s before it is due, all of A's, 1 s, 3 s before. A was submitted first."""
    policy, a, p = LARS(), running(0, 10, 5, slo=SLO(ttft=3)), running(1, 10, 5, slo=SLO(ttft=5))
    policy._whole = {a: 1.0, p: 2.0}
    a.computed, a.ready, p.computed, p.ready = 0, 10, 5, 5
    policy._waiting.push(a, 2.0, 1.0)
    plan: Any = SimpleNamespace(can_admit=True)
    assert policy._by_slack(plan, view_of(prefilling=[p], now=0.0)) == [p, a]


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
