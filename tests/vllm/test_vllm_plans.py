"""A policy plans the same in this package's engine and in vLLM's real scheduler: every view and plan, iteration by iteration."""

from typing import Any

import contended
import pytest
from contended import BLOCK, LIMITS, LinearCost, decisions_of

from cbatch import SLO, Plan, Policy, Request, View
from cbatch.replay.decisions import Decided, Decision, Seen, StepEnd, look, read

Events = list[Decision | StepEnd]
BLOCKS = {"ample": 200, "tight": contended.NUM_BLOCKS}


def requests() -> list[Request]:
    """Those of `contended`, of several clients and with objectives."""
    tiers = ({"slo": SLO(ttft=0.02, tbt=0.01)}, {"slo": SLO(total=0.3)}, {})
    return [
        Request(
            each.id,
            each.num_prompt_tokens,
            each.max_new_tokens,
            arrival_time=each.arrival_time,
            client="ab"[each.id % 2],
            priority=each.id % 3,
            predicted_new_tokens=1 + each.max_new_tokens // 2,
            **tiers[each.id % 3],
        )
        for each in contended.requests()
    ]


class Looking:
    """A policy of which each view and plan is kept."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.seen: list[tuple[Seen, Decided]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def plan(self, view: View) -> Plan:
        seen = look(view)
        plan = self.policy.plan(view)
        self.seen.append((seen, read(plan)))
        return plan


def run_vllm(rig: Any, events: Events) -> None:
    """Serves the requests with vLLM's scheduler, by the clock of a recorded run."""
    arriving = sorted(requests(), key=lambda request: request.arrival_time)
    for event in events:
        if isinstance(event, StepEnd):
            rig.now = event.ended
            rig.update()
            continue
        while arriving and arriving[0].arrival_time <= event.seen.now:
            rig.now = arriving[0].arrival_time
            rig.scheduler.add_request(rig.request(arriving.pop(0)))
        rig.now = event.seen.now
        if not rig.schedule().total_num_scheduled_tokens:
            rig.in_flight.pop()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kv", BLOCKS)
@pytest.mark.parametrize("name", contended.POLICIES)
def test_a_policy_plans_in_vllm_as_in_the_engine(name: str, kv: str, asynchronous: bool, vllm_rig: Any) -> None:
    from cbatch.vllm import Adapter

    make = contended.POLICIES[name]
    events = decisions_of(make(), requests(), BLOCKS[kv], asynchronous)
    decisions = [
        event for event in events if isinstance(event, Decision) and (event.seen.waiting or event.seen.running)
    ]
    looking = Looking(make())
    adapter = Adapter(looking, cost=LinearCost(), tile=LIMITS.tile, batch=LIMITS.max_batch)
    rig = vllm_rig.Rig(adapter, LIMITS, BLOCKS[kv], BLOCK, asynchronous=asynchronous)
    run_vllm(rig, events)
    for found, expected in zip(looking.seen, decisions, strict=False):
        assert found == (expected.seen, expected.decided), f"iteration {expected.iteration}"
    assert len(looking.seen) == len(decisions) > 20
    assert not rig.scheduler.requests
    assert rig.scheduler.counts.short == rig.scheduler.counts.unplanned == 0
