"""CPU time of a plan for each built-in policy: 256 running requests, and 10,000 or 100,000 that wait.

Simulated on an H200, so that policies can predict times. Requests of several clients, priorities and objectives end and are
admitted all the time, about one per iteration. Only `Policy.plan` is timed, with the calls of the builder and the view that it makes.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cbatch import SLO, KVSize, Limits, Plan, Policy, Request, RequestSpec, Server, View
from cbatch.sim import ProfileCost, SimExecutor, load_profile
from experiments.bench.sim import SPEC
from experiments.settings.compose import compose_run, policy_names

RUNNING, WAITING = 256, (10_000, 100_000)
WARM_UP, REPEATS, PLANS = 100, 3, 100
OBJECTIVES = SLO(ttft=6.0, tbt=0.05), SLO(ttft=20.0, tbt=0.2), SLO(total=600.0)
KEYS = ("chunk=1024", f"batch={RUNNING}", "predictor=noisy")
OWN_KEYS = {"qoserve": ("chunking=slack",)}


class Timed:
    """Any policy, with the CPU time of each plan, in milliseconds."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.times = policy, list[float]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def plan(self, view: View) -> Plan:
        begin = time.thread_time_ns()
        plan = self.policy.plan(view)
        self.times.append((time.thread_time_ns() - begin) / 1e6)
        return plan


def measure() -> dict[str, dict[str, Any]]:
    """Measures and prints; returns milliseconds by policy and number of waiting requests."""
    asked, found = _asks(max(WAITING) + 2 * RUNNING), {}
    print(f"\n{'CPU time of a plan, median ms':32} " + "".join(f"{number:>10,} waiting" for number in WAITING))
    for name in policy_names():
        cases = {number: _once(name, asked[: number + 2 * RUNNING]) for number in WAITING}
        found[name] = {f"waiting {number}": figures for number, figures in cases.items()}
        print(f"  {name:30} " + "".join(f"{figures['median']:18.3f}" for figures in cases.values()), flush=True)
    return found


def _asks(count: int) -> list[RequestSpec]:
    random = np.random.default_rng(0)
    columns = (random.integers(*bounds, count).tolist() for bounds in ((50, 500), (100, 400), (0, 27), (0, 3)))
    return [
        RequestSpec(
            id_,
            prompt,
            output,
            arrival_time=id_ * 1e-5,
            client=f"client {client}",
            priority=client % 4,
            slo=OBJECTIVES[kind],
        )
        for id_, (prompt, output, client, kind) in enumerate(zip(*columns, strict=True))
    ]


def _once(name: str, asked: Sequence[RequestSpec]) -> dict[str, float]:
    """Returns the median of a plan, the least of `REPEATS` measurements in one run, and the mean of all plans."""
    policy, profile = (
        Timed(compose_run(f"policy={name}", *KEYS, *OWN_KEYS.get(name, ())).policy()),
        load_profile("h200"),
    )
    cost = ProfileCost(profile, SPEC)
    server = Server(
        SimExecutor(cost, profile.host_time(asynchronous=True)),
        Limits(RUNNING, 8192, 1024),
        cost,
        KVSize(RUNNING * 64, 16),
    )
    engine = server.engine(policy, map(Request.from_spec, asked))
    while len(engine.view.running) < RUNNING * 0.8 or len(policy.times) < WARM_UP:
        engine.step()
    policy.times.clear()
    while len(policy.times) < REPEATS * PLANS:
        engine.step()
    medians = [statistics.median(policy.times[begin : begin + PLANS]) for begin in range(0, REPEATS * PLANS, PLANS)]
    return {"median": min(medians), "mean": statistics.mean(policy.times), "max": max(policy.times)}
