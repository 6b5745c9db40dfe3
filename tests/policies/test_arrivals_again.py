"""Inside vLLM a request that is not admitted as planned, or that vLLM preempts, arrives again: that changes no plan."""

from dataclasses import replace

import pytest
from contended import BLOCK, LIMITS, NUM_BLOCKS, POLICIES, LinearCost, requests, simulated
from schedules import Logged, Wrapped

from cbatch import Engine, Plan, Policy, Request, View
from cbatch.request import spec_of


class Again(Wrapped):
    """A policy to which waiting requests arrive again before every third plan, if `again`."""

    def __init__(self, policy: Policy, again: bool) -> None:
        super().__init__(policy)
        self._again = again

    def plan(self, view: View) -> Plan:
        arrive = getattr(self.policy, "on_arrival", None)
        for request in view.waiting if self._again and arrive and view.iteration % 3 == 0 else ():
            arrive(request)
        return self.policy.plan(view)


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 200], ids=["small", "large"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_request_that_arrives_again_changes_no_plan(name: str, num_blocks: int) -> None:
    specs = [spec_of(request) for request in requests()]
    named = [replace(spec, client="ab"[spec.id % 2], session=f"{spec.id % 5}", priority=spec.id % 3) for spec in specs]
    plans = []
    for again in (False, True):
        policy = Logged(Again(POLICIES[name](), again))
        engine = Engine(policy, simulated(), LIMITS, LinearCost(), num_blocks=num_blocks, block_size=BLOCK)
        engine.submit(map(Request.from_spec, named))
        engine.run()
        plans.append(policy.lines)
    assert plans[0] == plans[1]
