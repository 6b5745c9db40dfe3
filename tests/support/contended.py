"""Sixteen requests that arrive faster than a small KV cache can serve them, and the decisions of policies on them."""

from collections.abc import Iterable
from functools import partial

import numpy as np
from every_policy import EVERY_POLICY

from cbatch import BatchShape, Engine, Limits, Policy, Request
from cbatch.replay.decisions import Decision, StepEnd, record_decisions
from cbatch.sim.executor import SimExecutor

BATCH, NUM_BLOCKS, BLOCK = 4, 18, 4
LIMITS = Limits(BATCH, 200, 60, tile=8)
POLICIES = {name: partial(make, 8) for name, make in EVERY_POLICY.items()}


class LinearCost:
    def predict(self, shape: BatchShape) -> float:
        return 2e-3 + 1e-4 * shape.num_tokens


def requests() -> list[Request]:
    """Poisson arrivals, faster than they can be served, so that they queue and the KV cache fills up."""
    random = np.random.default_rng(3)
    arrivals = np.cumsum(random.exponential(5e-3, 16))
    return [
        Request(index, prompt, output, arrival_time=float(arrival), prompt=random.integers(0, 96, prompt).tolist())
        for index, (arrival, prompt, output) in enumerate(
            zip(arrivals, random.integers(1, 40, 16).tolist(), random.integers(1, 16, 16).tolist(), strict=True)
        )
    ]


def decisions_of(
    policy: Policy, served: Iterable[Request], num_blocks: int, asynchronous: bool
) -> list[Decision | StepEnd]:
    """What the policy decides in simulation."""
    engine = Engine(
        policy,
        SimExecutor(LinearCost()),
        LIMITS,
        LinearCost(),
        num_blocks=num_blocks,
        block_size=BLOCK,
        asynchronous=asynchronous,
    )
    engine.submit(served)
    events: list[Decision | StepEnd] = []
    with record_decisions(engine, events.append):
        engine.run()
    return events


def simulated() -> SimExecutor:
    return SimExecutor(LinearCost(), 1e-4)
