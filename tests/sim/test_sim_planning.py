"""What a policy's own code takes to plan is charged to the host, and what exceeds the device's slack delays the device."""

from dataclasses import replace
from itertools import count
from typing import Literal

import pytest
from schedules import UnitCost

from cbatch import KVSize, Limits, Request, Server
from cbatch.cost import BatchShape
from cbatch.runtime.options import Options
from cbatch.sim import HostTime, PlanningExecutor, ProfileCost, SimExecutor, load_profile
from cbatch.sim import executor as sim_executor
from experiments.profile.host import chunk_seconds
from experiments.settings.backend import ExecutorParts
from experiments.settings.backends import Simulated
from experiments.setup.presets import load_spec
from policies.evictions import LRU
from policies.orca import Orca

DEVICE, HOST = 0.010, 0.001


class EvenCost:
    def predict(self, shape: BatchShape) -> float:
        return DEVICE


@pytest.mark.parametrize(
    ("asynchronous", "plan", "iteration"),
    [
        (False, 0.004, DEVICE + HOST + 0.004),  # one after the other
        (True, 0.004, DEVICE),  # hidden behind the device
        (True, 0.015, HOST + 0.015),  # the device waits for it
    ],
)
def test_plans_take_time(asynchronous: bool, plan: float, iteration: float, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = count()
    monkeypatch.setattr(sim_executor, "thread_time", lambda: plan * (next(readings) % 2))
    executor, tokens = PlanningExecutor(EvenCost(), HostTime(HOST)), 50
    server = Server(executor, Limits(4, 64, 100), EvenCost(), KVSize(100, 16), asynchronous=asynchronous)
    record = server.serve(Orca(), [Request(0, 10, tokens)])
    received = [step.received_at for step in record.steps]
    assert len(received) == executor.num_plans == tokens, "each iteration is planned"
    assert received[-2] - received[1] == pytest.approx((tokens - 3) * iteration)
    assert executor.planning_seconds == pytest.approx(tokens * plan)
    within_slack = DEVICE - HOST if asynchronous else 0.0
    late = plan + (tokens - 1) * max(plan - within_slack, 0.0)  # nothing is computed during the first
    assert executor.delay_seconds == pytest.approx(late)


@pytest.mark.parametrize("kind", [SimExecutor, PlanningExecutor])
def test_the_host_prepares_what_a_prompt_finds(kind: type[SimExecutor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second prompt comes to an idle device and finds 4 of its 5 tokens, in 0.2 s and 0.1 s each; a decode finds none."""
    monkeypatch.setattr(sim_executor, "thread_time", lambda: 0.0)
    executor = kind(UnitCost(), HostTime(0.5, seconds_per_found_prompt=0.2, seconds_per_found_token=0.1))
    server = Server(executor, Limits(1, 9, 9), UnitCost(), KVSize(9, 1), asynchronous=False, prefix_cache=LRU())
    requests = [Request(id_, 5, 2, prompt=[*range(5)], arrival_time=10.0 * id_) for id_ in range(2)]
    assert [step.started for step in server.serve(Orca(), requests).steps] == pytest.approx([0.5, 2.0, 11.1, 12.6])


@pytest.mark.parametrize("kind", [SimExecutor, PlanningExecutor])
def test_the_host_takes_longer_for_each_chunk_of_a_prompt(
    kind: type[SimExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts take 0.5 + 2 x 0.2 s before an iteration of 1 s, and their decodes 0.5 s."""
    monkeypatch.setattr(sim_executor, "thread_time", lambda: 0.0)
    executor = kind(UnitCost(), HostTime(0.5, seconds_per_chunk=0.2))
    server = Server(executor, Limits(2, 9, 9), UnitCost(), KVSize(10, 1), asynchronous=False)
    steps = server.serve(Orca(), [Request(id_, 3, 2) for id_ in range(2)]).steps
    assert [step.started for step in steps] == pytest.approx([0.9, 2.4])


@pytest.mark.parametrize("slower", [0.0, 2e-4])
def test_the_time_of_a_chunk_is_found_on_a_host_that_is_slower_than_it_was(slower: float) -> None:
    usual = HostTime(3e-4, 2e-6)
    cost, limits = ProfileCost(load_profile("h200"), load_spec("llama-3.1-8b")), Limits(8, 2048, 2048)
    executor = SimExecutor(cost, replace(usual, seconds=usual.seconds + slower, seconds_per_chunk=1.3e-4))
    server = Server(executor, limits, cost, KVSize(1024, 16))
    assert chunk_seconds(server, 1000, usual) == pytest.approx(1.3e-4)


@pytest.mark.parametrize(
    ("host_seconds", "kind", "host"),
    [
        (0, SimExecutor, HostTime(0)),
        (0.5, SimExecutor, HostTime(0.5)),
        ("auto", SimExecutor, None),
        ("measured", PlanningExecutor, None),
    ],
)
def test_the_host_is_the_profile_s_unless_seconds_are_given(
    host_seconds: float | Literal["auto", "measured"], kind: type[SimExecutor], host: HostTime | None
) -> None:
    backend, spec = Simulated(host_seconds=host_seconds), load_spec("llama-3.1-8b")
    cost = backend.cost("h200", spec, 8)
    executor = backend.executor(ExecutorParts(spec, cost, Limits(8, 64, 100), Options()), KVSize(100, 16))
    assert type(executor) is kind and executor.host == (host or cost.profile.host_time(True, spec))
