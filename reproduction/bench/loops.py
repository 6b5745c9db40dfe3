"""Both loops with no graphs, graphs of decodes only, and graphs of all iterations, on mixed traffic.

Sarathi-Serve's budget makes most iterations mixed: while requests wait, each holds the decodes and as many prompt
tokens as fill it. Graphs of decodes serve only the tail of the run; graphs of all iterations need the budget to be a
captured size, as a tile-aligned one is. The asynchronous loop hides the host's planning, graphs hide launches.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from cbatch import Limits, ModelSpec, Policy
from cbatch.runtime.options import Options
from experiments.bench.serving import MakeServer, Runs, gpu_server, repeat
from experiments.settings.command_line import Count
from experiments.settings.servers import equal_requests, release_memory
from experiments.settings.settings import read_settings
from experiments.workloads import Workload
from reproduction import RESULTS
from reproduction.experiment_files import composed, swept, workload
from reproduction.stored import write

LOOPS = {"sync": False, "async": True}


def main(repeats: Count = 3, folder: str = RESULTS) -> None:
    """Measures and prints; writes loops.json after each server. Settings are those of conf/experiment/loops.yaml."""
    config, requests = composed("loops"), workload("loops")
    settings, lengths = read_settings(config), config["workload"]["lengths"]
    spec, policy = settings.model, settings.policy
    batch, chunk, number = config["batch"], config["chunk"], requests.num_requests
    shortest, longest, ratio = lengths["min_length"], lengths["max_length"], lengths["pd_ratio"]
    stamped: dict[str, Any] = {"model": spec.name, "batch": batch, "chunk": chunk, "requests": number}
    stamped |= {"lengths": [shortest, longest], "ratio": ratio, "figures": {}}
    limits = Limits(batch, config["max_tokens"], longest)
    asked = f"{number} requests of {shortest} to {longest} tokens, P:D {ratio}"
    print(f"{spec.name}, batch {batch}, {asked}, {chunk} tokens per iteration")
    for graphs in swept("loops", "runtime.graphs"):
        stamped["figures"] |= measure(spec, limits, requests, policy, graphs, repeats)
        release_memory()
        path = write("loops", torch.cuda.get_device_name(), stamped, folder)
    print(f"written: {path}")


def measure(
    spec: ModelSpec,
    limits: Limits,
    requests: Workload,
    policy: Callable[[], Policy],
    graphs: str,
    repeats: int,
    make_server: MakeServer = gpu_server,
) -> dict[str, Any]:
    """Returns the figures of both loops on one server, by "LOOP, graphs GRAPHS"."""
    server = make_server(spec, limits, Options(graphs=graphs))  # type: ignore[arg-type] # conf/experiment/loops.yaml
    server.serve(policy(), equal_requests(limits.max_batch, limits.max_request_tokens // 2, 4, spec.vocab_size))
    report, found = server.executor.iteration.report, {}
    for loop, asynchronous in LOOPS.items():
        ask = partial(requests.requests, server.executor.vocabulary)
        runs = repeat(server, policy, ask, repeats, asynchronous=asynchronous)
        name = f"{loop}, graphs {graphs}"
        captured = {"graphs": report.num_graphs, "capture_seconds": report.seconds}
        found[name] = {**figures(runs), "eager_iterations": runs.eager, **captured}
        show(name, found[name])
    server.close()
    return found


def figures(runs: Runs) -> dict[str, Any]:
    steps = runs.record.steps
    mixed = np.array([step.num_prefill_tokens > 0 for step in steps])
    ends = np.array([step.received_at for step in steps])
    milliseconds = np.diff(ends, prepend=steps[0].planned_at) * 1e3
    kinds = {"mixed": milliseconds[mixed], "decodes alone": milliseconds[~mixed]}
    return {
        **runs.figures(),
        "median_ms": {kind: float(np.median(times)) if len(times) else None for kind, times in kinds.items()},
        "iterations": runs.served[-1].iterations,
        "mixed_iterations": int(mixed.sum()),
    }


def show(name: str, found: dict[str, Any]) -> None:
    keys = ("tokens_per_second", "ms_per_iteration", "active_share", "host_ms_per_iteration")
    speed, time, active, host = (found[key]["median"] for key in keys)
    eager = f"{found['eager_iterations']} of {found['iterations']} iterations eager"
    times = f"{time:7.3f} ms/iteration, device active {active:.2%}, host {host:.3f} ms"
    print(f"  {name:22} {speed:8.0f} tokens/s  {times}, {eager}", flush=True)
