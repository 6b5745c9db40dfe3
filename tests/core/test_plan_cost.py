"""The work of a plan does not grow with the number of waiting requests, in calls, which no clock disturbs."""

import sys
from types import FrameType
from typing import Any

import pytest
from every_policy import EVERY_POLICY
from schedules import UnitCost, Wrapped

from cbatch import SLO, Limits, Plan, Policy, Request, Server, View
from cbatch.kv import KVSize
from cbatch.sim.executor import SimExecutor
from policies.evictions import LRU
from policies.shared.prefixes import MOST_RANKED

BATCH, WARM_UP, PLANS = 4, 8, 12


class Counting(Wrapped):
    """Any policy, with the number of calls that each of its plans makes."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.calls = list[int]()

    def plan(self, view: View) -> Plan:
        self.calls.append(0)

        def count(frame: FrameType, event: str, argument: object) -> None:
            self.calls[-1] += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            return self.policy.plan(view)
        finally:
            sys.setprofile(None)


def calls(name: str, num_waiting: int, prefix_cache: bool) -> int:
    """Calls of some plans; before them all arrivals are taken in, and all who wait are promoted, once each."""
    policy, cost = Counting(EVERY_POLICY[name](8)), UnitCost()
    size, eviction = (KVSize(BATCH * 12, 2), LRU()) if prefix_cache else (KVSize(BATCH * 3, 16), None)
    server = Server(SimExecutor(cost), Limits(BATCH, 200, 64, tile=1), cost, size, False, prefix_cache=eviction)
    rest: dict[str, Any] = {"slo": SLO(ttft=1e6), "hash_block": 4}
    asked = [
        Request(id_, 5 + id_ % 7, 3 + id_ % 5, client=f"{id_ % 3}", prefix_hashes=(id_ % 5,), **rest)
        for id_ in range(num_waiting)
    ]
    engine = server.engine(policy, asked)
    while len(policy.calls) < WARM_UP + PLANS:
        engine.step()
    return sum(policy.calls[WARM_UP:])


@pytest.mark.long
@pytest.mark.parametrize("name", EVERY_POLICY)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_plan_with_four_times_the_queue_makes_as_many_calls(name: str, prefix_cache: bool) -> None:
    """The schedules differ where the shortest of more requests is shorter; a heap's depth shows in few calls."""
    few, many = calls(name, MOST_RANKED + 20, prefix_cache), calls(name, 4 * MOST_RANKED, prefix_cache)
    assert many < 1.5 * few, "work per waiting request would make it 3.5 times as many"
