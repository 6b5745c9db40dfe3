"""Policies forget requests that have ended: what they keep is bounded by what waits, not by what they have served."""

import gc
from weakref import WeakSet

import pytest
from every_policy import EVERY_POLICY

from cbatch import CostFunction, KVSize, Limits, Policy, Request, Server
from cbatch.sim import SimExecutor
from policies.evictions import LRU


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_a_policy_forgets_requests_that_have_ended(name: str) -> None:
    """Sessions of three clients, whose prompts share prefixes that stay in the cache; a heap may keep some outdated entries."""
    requests = [
        Request(
            number,
            14,
            3 + number % 5,
            arrival_time=0.02 * number,
            prefix_hashes=(number % 3, 10 + number % 3, 20 + number % 3 if number % 2 else 100 + number),
            hash_block=4,
            session=f"s{number // 4}",
            turn=number % 4,
            last=number % 4 == 3,
            client=f"c{number % 3}",
        )
        for number in range(150)
    ]
    policy = EVERY_POLICY[name](24)
    serve(policy, requests)
    kept = WeakSet(requests)
    del requests
    gc.collect()
    assert len(kept) <= 16


def serve(policy: Policy, requests: list[Request]) -> None:
    cost, limits = CostFunction(lambda shape: 0.01), Limits(8, 64, 100, tile=8, max_running=16)
    server = Server(SimExecutor(cost), limits, cost, KVSize(60, 4), prefix_cache=LRU())
    assert len(server.serve(policy, requests).requests) == len(requests)
