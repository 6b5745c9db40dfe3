"""Inside vLLM a policy may be told once more that a request waits, as one that is not admitted as planned: that changes no plan."""

from dataclasses import replace
from random import Random

import pytest
from contended import BLOCK, LIMITS, NUM_BLOCKS, POLICIES, LinearCost, requests, simulated
from schedules import Logged, Wrapped

from cbatch import Engine, KVSize, Limits, Plan, Policy, Request, Server, View
from cbatch.request import spec_of
from policies.evictions import LRU
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


class Refused(Wrapped):
    """A policy of whose plans some that only admit requests come to nothing, if `refuses`: it plans again, for the same state."""

    def __init__(self, policy: Policy, refuses: bool, seed: int) -> None:
        super().__init__(policy)
        self._refuses, self._random, self.num_refused = refuses, Random(seed), 0

    def plan(self, view: View) -> Plan:
        plan = self.policy.plan(view)
        while self._refuses and not (plan.preempt or plan.reject) and self._random.random() < 0.5:
            if not (plan.requests and all(map(view.is_waiting, plan.requests))):
                break
            self.num_refused += 1
            for request in plan.requests:
                getattr(self.policy, "on_wait", lambda request: None)(request)
            plan = self.policy.plan(view)
        return plan


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"past_future", "vtc_mdrr"}))
def test_a_plan_that_comes_to_nothing_changes_no_later_one(name: str, draw: int) -> None:
    """What a policy learns from its own plans, such as pins that end, counts only if vLLM has carried them out.

    Not so with past_future, which draws lengths for each plan, and vtc_mdrr, where a plan gives turns and quanta.
    """
    num_refused = 0
    for batch, num_blocks, more in ((1, 40, 2), (4, 40, 0), (4, NUM_BLOCKS, 0), (4, NUM_BLOCKS, 1)):
        seed = draw + more
        limits = Limits(batch, 200, 60, tile=8, max_running=2 * batch)
        served = [
            replace(
                spec_of(request),
                client="ab"[request.id % 2],
                session=f"{request.id % 5}",
                turn=request.id // 5,
                last=False,
                priority=request.id % 3,
            )
            for request in requests()
        ]
        lines = []
        for refuses in (False, True):
            policy = Logged(refused := Refused(POLICIES[name](), refuses, seed))
            size = KVSize(num_blocks, BLOCK)
            engine = Server(simulated(), limits, LinearCost(), size, False, prefix_cache=LRU()).engine(policy)
            engine.submit(map(Request.from_spec, served))
            engine.run()
            lines.append(policy.lines)
            num_refused += refused.num_refused
        assert lines[0] == lines[1], f"seed {seed}"
    assert num_refused


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
