"""Inside vLLM a policy may be told once more that a request waits, as one that is not admitted as planned: that changes no plan."""

from dataclasses import replace

import pytest
from contended import BLOCK, LIMITS, NUM_BLOCKS, POLICIES, LinearCost, requests, simulated
from schedules import Logged, Wrapped

from cbatch import Engine, Plan, Policy, Request, View
from cbatch.request import spec_of
from policies.shared.clients import clients_by


class Again(Wrapped):
    """A policy that is told again of all waiting requests before every third plan, if `again`."""

    def __init__(self, policy: Policy, again: bool) -> None:
        super().__init__(policy)
        self._again = again

    def plan(self, view: View) -> Plan:
        on_wait = getattr(self.policy, "on_wait", None)
        for request in view.waiting if self._again and on_wait and view.iteration % 3 == 0 else ():
            on_wait(request)
        return self.policy.plan(view)


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 200], ids=["small", "large"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_is_told_again_plans_the_same(name: str, num_blocks: int) -> None:
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


@pytest.mark.parametrize("order", ["vtc", "mdrr", "fcfs"])
def test_a_request_that_goes_back_keeps_its_place_among_those_of_its_client(order: str) -> None:
    first, second = Request(0, 1, 1), Request(1, 1, 1, arrival_time=1.0)
    clients = clients_by(order, {}, True, 1.0)
    clients.push(first)
    clients.push(second)
    clients.take(first)
    assert clients.first() is second
    clients.push(first)
    assert clients.first() is first
