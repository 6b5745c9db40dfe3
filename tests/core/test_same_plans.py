"""The same workload and policy make the same plans with real tokens and in simulation, once the clock is the same."""

from contextlib import closing
from dataclasses import replace
from itertools import cycle

import pytest
from contended import BLOCK, LIMITS, NUM_BLOCKS, POLICIES, LinearCost, requests, simulated
from schedules import Logged
from tiny_models import LLAMA, make_executor

from cbatch import Engine, Executor, Policy

MODEL = replace(LLAMA, name="one layer", num_layers=1)  # no plan depends on the tokens


def plans(policy: Policy, executor: Executor, asynchronous: bool) -> list[str]:
    logged = Logged(policy)
    engine = Engine(
        logged, executor, LIMITS, LinearCost(), num_blocks=NUM_BLOCKS, block_size=BLOCK, asynchronous=asynchronous
    )
    engine.submit(requests())
    engine.run()
    return logged.lines


@pytest.mark.parametrize(("name", "asynchronous"), list(zip([*POLICIES][::4], cycle((True, False)))))
def test_the_cpu_executor_plans_as_the_simulation_whose_times_it_replays(
    name: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fourth policy: what may differ is the executor."""
    recorded, times = simulated(), list[float]()
    now = recorded.now
    monkeypatch.setattr(recorded, "now", lambda: (times.append(now()), times[-1])[1])
    expected = plans(POLICIES[name](), recorded, asynchronous)
    with closing(make_executor(MODEL, LIMITS, NUM_BLOCKS, BLOCK)) as real:
        monkeypatch.setattr(real, "now", iter(times).__next__)
        monkeypatch.setattr(real, "sleep_until", lambda time: None)  # the recorded clock has passed it already
        assert plans(POLICIES[name](), real, asynchronous) == expected
