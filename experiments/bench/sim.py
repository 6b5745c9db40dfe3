"""Simulated iterations per second, on one core: 128 running requests, decodes with chunks of prompts among them.

With outputs of 300 to 900 tokens and with long ones; once as it is, and once asking the policy for each plan, without leaps
(`cbatch.leap`), in turn. Seconds are CPU time, as other work on the machine lengthens wall time. Also the parts that a user waits for: loading each profile, predicting one iteration, reading a trace.
"""

import tempfile
import time
import timeit
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from cbatch import BatchShape, KVSize, Limits, ModelSpec, Policy, Request, Server
from cbatch.sim import ProfileCost, SimExecutor, load_profile
from cbatch.sim.profile_file import profile_names
from experiments.settings.this_machine import cpu_name
from experiments.store.benchmark_file import spread, write
from experiments.workloads.readers.traces import read_trace
from policies.chunking import TileAligned
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

BATCH, REPEATS = 128, 5
OUTPUTS = {"": (1000, 300, 900), ", long outputs": (800, 2000, 6000)}
"""Number of requests, and shortest and longest output."""

SPEC = ModelSpec("llama-3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072)
POLICIES: dict[str, Callable[[], Policy]] = {
    "orca": Orca,
    "prefill_first": PrefillFirst,
    "sarathi, chunk 1024": lambda: Sarathi(TileAligned(1024)),
    "sarathi_serve, chunk 1024": lambda: SarathiServe(TileAligned(1024)),
}


def main(folder: str = "results") -> None:
    """Measure, print and write sim.json."""
    figures = {}
    print(f"simulation on one core of {cpu_name()}: batch {BATCH}")
    for (name, make), (kind, outputs) in product(POLICIES.items(), OUTPUTS.items()):
        runs = [(_once(Asked(make()), *outputs), _once(make(), *outputs)) for _ in range(REPEATS)]
        asked, rates = (spread([rate for rate, _ in each]) for each in zip(*runs, strict=True))
        gain, mean_batch = spread([after / before for (before, _), (after, _) in runs]), runs[0][0][1]
        figures[f"{name}{kind}"] = {
            "iterations_per_second": rates,
            "without_leaps": asked,
            "gain": gain,
            "mean_batch": mean_batch,
        }
        extremes = f"({rates['min']:.0f} to {rates['max']:.0f}), {gain['median']:.2f} times those without leaps"
        print(f"  {name + kind:42} {rates['median']:8.0f} iterations/s   {extremes}, mean batch {mean_batch:.0f}")
    parts = _seconds_of_parts()
    for name, seconds in parts.items():
        print(f"  {name:40} {1e6 * seconds['median']:12,.1f} us")
    print(f"written: {write('sim', cpu_name(), {'figures': figures, 'seconds': parts}, folder)}")


def _seconds_of_parts() -> dict[str, dict[str, float]]:
    cost, shape = ProfileCost(load_profile("h200"), SPEC), BatchShape(((480, 1024),), BATCH, BATCH * 1024)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as trace:
        trace.write("num_prefill_tokens,num_decode_tokens\n")
        trace.writelines(f"{100 + index % 900},{50 + index % 400}\n" for index in range(10_000))
        trace.flush()
        return {
            "predict an iteration": _spread_of(lambda: cost.predict(shape), 2000),
            "read a trace of 10,000 requests": _spread_of(lambda: read_trace(trace.name)),
            **{f"load profile {name}": _spread_of(partial(load_profile, name)) for name in profile_names()},
        }


def _spread_of(action: Callable[[], object], number: int = 1) -> dict[str, float]:
    return spread([seconds / number for seconds in timeit.repeat(action, number=number, repeat=REPEATS)])


class Asked:
    """A policy that says nothing of being steady."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.plan = policy.plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


def _once(policy: Policy, num_requests: int, least: int, most: int) -> tuple[float, float]:
    """Returns (iterations per second, mean requests per iteration) of one run, without making the requests."""
    profile = load_profile("h200")
    cost = ProfileCost(profile, SPEC)
    executor = SimExecutor(cost, profile.host_time(asynchronous=True))
    server = Server(executor, Limits(BATCH, 16384, 8192), cost, KVSize(profile.kv_tokens(SPEC) // 16, 16))
    random = np.random.default_rng(0)
    lengths = zip(random.integers(100, 2000, num_requests), random.integers(least, most, num_requests), strict=True)
    requests = [Request(index, int(prompt), int(output)) for index, (prompt, output) in enumerate(lengths)]
    engine = server.engine(policy, requests)
    begin = time.process_time()
    record = engine.run()
    seconds = time.process_time() - begin
    return len(record.steps) / seconds, sum(step.num_requests for step in record.steps) / len(record.steps)
