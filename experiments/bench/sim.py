"""Simulated iterations a second, on one core: 128 running requests, decodes with chunks of prompts among them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cbatch import Engine, Limits, Policy, Request
from cbatch.model import ModelSpec
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from cbatch.sim.profile_file import load_profile
from experiments.store.benchmark_file import cpu_name, spread, write
from policies.chunking import TileAligned
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

NUM_REQUESTS, BATCH, REPEATS = 1000, 128, 5
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
    print(f"simulation on one core of {cpu_name()}: {NUM_REQUESTS} requests, batch {BATCH}")
    for name, make in POLICIES.items():
        runs = [_once(make()) for _ in range(REPEATS)]
        rates = spread([rate for rate, _ in runs])
        figures[name] = {"iterations_per_second": rates, "mean_batch": runs[0][1]}
        print(
            f"  {name:28} {rates['median']:8.0f} iterations/s   ({rates['min']:.0f} to {rates['max']:.0f}), "
            f"mean batch {runs[0][1]:.0f}"
        )
    print(f"written: {write('sim', cpu_name(), {'figures': figures}, Path(folder))}")


def _once(policy: Policy) -> tuple[float, float]:
    """(iterations a second, mean requests in an iteration) of one run, construction of the requests left out."""
    profile = load_profile("h200")
    cost = ProfileCost(profile, SPEC)
    engine = Engine(
        policy,
        SimExecutor(cost, profile.host(asynchronous=True)),
        Limits(BATCH, 16384, 8192),
        cost,
        num_blocks=profile.kv_tokens(SPEC) // 16,
        block_size=16,
    )
    random = np.random.default_rng(0)
    lengths = zip(random.integers(100, 2000, NUM_REQUESTS), random.integers(300, 900, NUM_REQUESTS), strict=True)
    requests = [Request(index, int(prompt), int(output)) for index, (prompt, output) in enumerate(lengths)]
    engine.submit(requests)
    begin = time.perf_counter()
    record = engine.run()
    seconds = time.perf_counter() - begin
    return len(record.steps) / seconds, sum(step.num_requests for step in record.steps) / len(record.steps)
