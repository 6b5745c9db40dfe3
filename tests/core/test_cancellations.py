"""Clients leave at every moment, whatever the policy: nothing leaks or stalls, and the others get the tokens that they get alone.

    python -m pytest tests/core/test_cancellations.py --cancellations=1000

cancels that many requests of each policy and mode: before they arrive, while they wait, in prefill, while they decode, preempted,
with one or several iterations in flight; by their timeouts and by `Engine.cancel`.
"""

import random
from collections import Counter

import pytest
from contended import LinearCost
from every_policy import EVERY_POLICY
from inventory import take_inventory
from rig import check_accounts
from schedules import Wrapped
from small_cluster import make_cost
from test_prefix_cache import MODES, STOPS, Hashing, text_of

from cbatch import Engine, FinishReason, Limits, Plan, Policy, Request, Server, Status, View
from cbatch.kv import KVSize, blocks_for
from cbatch.model.topology import Topology
from cbatch.request import leaves_at
from cbatch.stall import Patience

LONGEST = 42


class Heard(Wrapped):
    """A policy, and what it hears. It sees no request that has ended."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.arrived, self.ended = list[Request](), list[Request]()

    def on_arrival(self, request: Request) -> None:
        self.arrived.append(request)
        getattr(self.policy, "on_arrival", lambda request: None)(request)

    def on_finish(self, request: Request) -> None:
        self.ended.append(request)
        getattr(self.policy, "on_finish", lambda request: None)(request)

    def plan(self, view: View) -> Plan:
        assert all(
            each.status is not Status.FINISHED and leaves_at(each) > view.now for each in (*view.waiting, *view.running)
        )
        return self.policy.plan(view)


def draw(numbers: random.Random) -> list[Request]:
    now, requests = 0.0, []
    for id_ in range(numbers.randint(3, 8)):
        now += numbers.choice((0.0, 0.0, 2e-3, 0.02))
        prompt = [numbers.randint(10, 90) for _ in range(numbers.randint(1, 30))]
        timeout = numbers.choice((None, None, 1e-4, numbers.uniform(1e-3, 0.1)))
        ends = {"timeout": timeout, "stop_tokens": STOPS if numbers.random() < 0.3 else ()}
        slots = {"client": numbers.choice("abc"), "priority": numbers.randint(0, 2), "arrival_time": now}
        requests.append(Request(id_, len(prompt), numbers.randint(1, 12), prompt=prompt, **ends, **slots))  # type: ignore[arg-type]
    return requests


def serve(policy: Heard, numbers: random.Random, num_stages: int, asynchronous: bool) -> list[Request]:
    """Serves random requests, some of which are cancelled, to the end."""
    requests, batch, size = draw(numbers), numbers.randint(1, 4), numbers.choice((1, 3, 4))
    limits = Limits(batch, LONGEST + batch, LONGEST, tile=8, num_stages=num_stages, max_running=batch * num_stages)
    kv = KVSize(max(blocks_for(request.max_tokens, size) for request in requests) + numbers.choice((0, 2, 20)), size)
    executor = Hashing(make_cost(Topology(1, num_stages)) if num_stages > 1 else LinearCost(), 1e-4)
    server = Server(executor, limits, LinearCost(), kv, asynchronous, Patience(50.0, 2000))
    engine, often = server.engine(policy, requests), numbers.choice((0.0, 0.05, 0.2))

    def leave(engine: Engine) -> None:
        if numbers.random() < often:
            engine.cancel(numbers.choice(requests))
        inventory = take_inventory([engine], requests)
        assert (inventory.num_requests, inventory.num_blocks) == (len(requests), kv.num_blocks)
        assert engine.num_unfinished == len(requests) - len(engine.record.requests)

    leave(engine)
    engine.run(leave)
    check_accounts(engine, requests)
    return requests


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EVERY_POLICY)
def test_nothing_leaks_or_stalls_and_the_others_get_their_tokens(
    name: str, mode: str, num_cancellations: int, draw: int
) -> None:
    num_cancelled, seed = 0, draw
    while num_cancelled < num_cancellations:
        numbers, seed = random.Random(seed), seed + 1
        policy = Heard(EVERY_POLICY[name](8 * numbers.randint(1, 3)))
        for request in serve(policy, numbers, *MODES[mode]):
            output = text_of(request)[request.num_prompt_tokens :]
            cancelled = request.finish_reason is FinishReason.CANCELLED
            assert request.output == (output[: request.num_output_tokens] if cancelled else output), f"seed {seed - 1}"
            num_cancelled += cancelled
        assert Counter(policy.arrived) == Counter(policy.ended) and max(Counter(policy.ended).values(), default=1) == 1
