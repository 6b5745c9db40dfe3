"""The same workload and policy make the same plans with real tokens and in simulation, once the clock is the same."""

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from clock_replay import RecordedTimes, ReplayedTimes
from landscape import LANDSCAPE
from schedules import Logged
from tiny_models import LLAMA, make_executor

from cbatch import BatchShape, CbatchError, Engine, Executor, Limits, Policy, Request
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
MODEL = replace(LLAMA, name="one layer", num_layers=1)  # no plan depends on the tokens
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


def plans(policy: Policy, executor: Executor, asynchronous: bool) -> list[str]:
    logged = Logged(policy)
    engine = Engine(
        logged, executor, LIMITS, LinearCost(), num_blocks=NUM_BLOCKS, block_size=BLOCK, asynchronous=asynchronous
    )
    engine.submit(requests())
    engine.run()
    return logged.lines


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


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", POLICIES)
def test_the_cpu_executor_plans_as_the_simulation_whose_times_it_replays(name: str, asynchronous: bool) -> None:
    recorded = RecordedTimes(simulated())
    expected = plans(POLICIES[name](), recorded, asynchronous)
    with closing(make_executor(MODEL, LIMITS, NUM_BLOCKS, BLOCK)) as real:
        assert plans(POLICIES[name](), ReplayedTimes(real, recorded.times), asynchronous) == expected


@pytest.mark.parametrize("name", POLICIES)
def test_the_simulation_plans_as_the_cpu_executor_whose_times_it_replays(name: str) -> None:
    with closing(make_executor(MODEL, LIMITS, NUM_BLOCKS, BLOCK)) as real:
        recorded = RecordedTimes(real)
        expected = plans(POLICIES[name](), recorded, asynchronous=True)
    assert plans(POLICIES[name](), ReplayedTimes(simulated(), recorded.times), asynchronous=True) == expected


def test_a_replay_that_outlasts_its_recording_says_so() -> None:
    with pytest.raises(CbatchError, match="their plans differ"):
        plans(Orca(), ReplayedTimes(simulated(), [0.0] * 20), asynchronous=True)
