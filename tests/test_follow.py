"""Decisions followed without an engine: a policy sees the recorded views, and so repeats its plans at every one."""

from collections.abc import Callable

import pytest
from test_same_plans import BLOCK, LIMITS, NUM_BLOCKS, POLICIES, LinearCost, requests

from cbatch import Engine, Policy
from cbatch.replay.counterfactual import Comparison, Recorded
from cbatch.replay.decisions import Decision, StepEnd, record_decisions
from cbatch.replay.follow import follow
from cbatch.sim.executor import SimExecutor


def record(policy: Policy, asynchronous: bool, num_blocks: int = NUM_BLOCKS) -> Recorded:
    engine = Engine(
        policy,
        SimExecutor(LinearCost()),
        LIMITS,
        LinearCost(),
        num_blocks=num_blocks,
        block_size=BLOCK,
        asynchronous=asynchronous,
    )
    engine.submit(requests())
    events: list[Decision | StepEnd] = []
    with record_decisions(engine, events.append):
        engine.run()
    return Recorded(LIMITS, num_blocks, BLOCK, 1, asynchronous, events)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_repeats_its_plans_at_the_recorded_views(name: str, asynchronous: bool) -> None:
    make: Callable[[], Policy] = POLICIES[name]
    recorded, found = record(make(), asynchronous), list[Comparison]()
    follow(recorded, requests(), make(), LinearCost(), found.append)
    assert len(found) == sum(isinstance(event, Decision) for event in recorded.events) > 30
    for comparison in found:
        assert comparison.same, (comparison.recorded, comparison.answer)
