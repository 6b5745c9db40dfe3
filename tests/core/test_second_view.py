"""Policies, plan builder and plan rules need no more than the public view: a host without the engine gets the same plans."""

from collections.abc import Callable

import pytest
from contended import BLOCK, LIMITS, NUM_BLOCKS, POLICIES, LinearCost, requests
from fuzz_policy import FuzzPolicy
from plain_view import PlainHost

from cbatch import Engine, Limits, Plan, Policy, Request, View
from cbatch.plan_check import check_rules
from cbatch.replay.decisions import read
from cbatch.sim.executor import SimExecutor


class OnBothViews:
    """Asks one copy of a policy with the engine's view and one with a plain view; their plans must agree and be legal."""

    def __init__(self, make: Callable[[], Policy], **ignored: object) -> None:
        self.policy, self.other = make(), make()
        self.host = PlainHost()
        self.num_plans = 0

    def plan(self, view: View) -> Plan:
        plain = self.host.look(view)
        plan, other = self.policy.plan(view), self.other.plan(plain)
        assert read(other) == read(plan)
        check_rules(plan, view, "P")
        check_rules(other, plain, "P")
        self.num_plans += 1
        return plan

    def on_arrival(self, request: Request) -> None:
        self._tell("on_arrival", request)

    def on_finish(self, request: Request) -> None:
        self._tell("on_finish", request)

    def _tell(self, method: str, request: Request) -> None:
        for policy, subject in ((self.policy, request), (self.other, self.host.copy(request))):
            getattr(policy, method, lambda request: None)(subject)


def fuzz() -> Policy:
    return FuzzPolicy(5, preempts=0.1, rejects=0.01)


@pytest.mark.parametrize("num_stages", [0, 3], ids=["sync", "pipeline"])
@pytest.mark.parametrize("make", [*POLICIES.values(), fuzz], ids=[*POLICIES, "fuzz"])
def test_a_policy_plans_the_same_over_a_view_without_an_engine(make: Callable[[], Policy], num_stages: int) -> None:
    both = OnBothViews(make)
    executor, limits = SimExecutor(LinearCost()), LIMITS
    if num_stages > 1:
        executor.num_stages = num_stages
        limits = Limits(LIMITS.max_batch, 200, 60, tile=8, num_stages=num_stages)
    size = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK}
    engine = Engine(both, executor, limits, LinearCost(), **size, asynchronous=num_stages > 0)
    engine.submit(requests())
    engine.run()
    assert both.num_plans > 50
