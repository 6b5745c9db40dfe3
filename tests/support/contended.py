"""Sixteen requests that arrive faster than a small KV cache can serve them, and the decisions of policies on them."""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from landscape import LANDSCAPE

from cbatch import BatchShape, Engine, Limits, Policy, Request
from cbatch.replay.decisions import Decision, StepEnd, record_decisions
from cbatch.sim.executor import SimExecutor
from policies.chunking import Filling, Fixed, PDAware, TileAligned
from policies.longest_first import LongestFirst
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

BATCH, NUM_BLOCKS, BLOCK = 4, 18, 4
LIMITS = Limits(BATCH, 200, 60, tile=8)
POLICIES: dict[str, Callable[[], Policy]] = {
    "request_level": RequestLevel,
    "orca": Orca,
    "prefill_first": PrefillFirst,
    "sarathi": lambda: Sarathi(TileAligned(8)),
    "sarathi_pd_aware": lambda: Sarathi(PDAware()),
    "sarathi_serve": lambda: SarathiServe(Fixed(8)),
    "sarathi_serve_filling": lambda: SarathiServe(Filling(24, 8, share=0.7)),
    "longest_first": lambda: LongestFirst(Fixed(8)),
    **{name: partial(make, 8) for name, make in LANDSCAPE.items()},
}


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
