"""A million requests of ServeGen through one policy in one process: time and memory, with results written as they come.

    python -m experiments.bench million trace=.../servegen_..._trace.csv.gz dataset=.../servegen_..._dataset.jsonl.gz
                                        [policy=sarathi_serve] [num_requests=1000000] [rate=30] [output=million] [folder=results]

Llama-3.1-8B on an H200 as the profile h200 measured it, at most 256 requests in an iteration, 1,024 tokens for policies that
take a chunk. `output` is the folder of requests.csv and steps.csv. Requests are made from columns when they are about to arrive.
"""

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from cbatch import ConfigError, Limits, Request, Server
from cbatch.kv import KVSize
from cbatch.results.metrics import statistics
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from cbatch.sim.profile_file import load_profile
from experiments.bench.sim import SPEC
from experiments.config.command_line import Count
from experiments.config.composition import policy_of
from experiments.config.this_machine import cpu_name
from experiments.store.benchmark_file import write
from experiments.store.csv_tables import LATENCY_COLUMNS
from experiments.store.run_folder import REQUESTS
from experiments.store.streamed import StreamedTables
from experiments.workloads import ServeGen
from experiments.workloads.trace import Trace

BATCH, MAX_TOKENS, CHUNK = 256, 16384, 1024


def main(
    trace: str,
    dataset: str,
    policy: str = "sarathi_serve",
    num_requests: Count = 1_000_000,
    rate: float = 30.0,
    output: str = "million",
    folder: str = "results",
) -> None:
    """Serves, prints and writes million.json. rate: requests per second."""
    if not rate > 0:
        raise ConfigError(f"rate={rate}: give requests per second, above 0")
    profile = load_profile("h200")
    cost, (served_by, _) = ProfileCost(profile, SPEC), policy_of(f"policy={policy}", f"chunk={CHUNK}")
    server = Server(
        SimExecutor(cost, profile.host(asynchronous=True)),
        Limits(BATCH, MAX_TOKENS, SPEC.max_positions),
        cost,
        KVSize(profile.kv_tokens(SPEC) // 16, 16),
    )
    seconds_of_data = 1.05 * num_requests / rate + 1200  # chance and bursts leave enough
    drawn = ServeGen(path=trace, dataset=dataset, duration=seconds_of_data, rate=rate).trace()
    requests = make_requests(drawn.first(num_requests))
    before, began, cpu = peak_memory(), time.perf_counter(), time.process_time()
    with StreamedTables(Path(output)) as tables:
        server.serve_stream(served_by, requests, tables.take)
    figures = {
        "policy": policy,
        "requests": tables.num_requests,
        "requests_per_second": rate,
        "iterations": tables.num_iterations,
        "generated_tokens": tables.num_tokens,
        "simulated_seconds": server.executor.now(),
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - began,
        "peak_memory_mb": {"before the first request": before, "at the end": peak_memory()},
    }
    seconds = latencies(Path(output) / REQUESTS)
    for name, value in figures.items():
        shown = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        print(f"  {name:24} {shown}")
    print(f"  requests and iterations: {output}")
    print(f"written: {write('million', cpu_name(), {'figures': figures, 'seconds': seconds}, Path(folder))}")


def make_requests(trace: Trace) -> Iterator[Request]:
    """One by one, as they are asked for."""
    assert trace.arrival_time is not None
    columns = trace.prompt_tokens, trace.output_tokens, trace.arrival_time, trace.fields["client"]
    for index, (prompt, generated, arrival, client) in enumerate(zip(*columns, strict=True)):
        yield Request(index, int(prompt), int(generated), arrival_time=float(arrival), client=str(client))


def latencies(path: Path) -> dict[str, dict[str, float]]:
    """Mean and percentiles of the columns of a run's requests, read one at a time."""
    columns = ((name, pd.read_csv(path, usecols=[name])[name].to_numpy(np.float64)) for name in LATENCY_COLUMNS)
    return {name: statistics(values) for name, values in columns}


def peak_memory() -> float:
    """MB of this process, resident at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
