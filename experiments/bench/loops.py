"""Both loops with no graphs, graphs of decodes alone, and graphs of all iterations: what each brings to mixed traffic.

Sarathi-Serve's budget makes most iterations mixed: while requests wait, each holds the decodes and as many prompt tokens as
fill it. Graphs of decodes alone serve what is left at the end; graphs of all iterations need the budget to be a captured
size, which a tile-aligned one is. The asynchronous loop hides the host's planning, graphs the launching of kernels:
together they leave the device nothing to wait for, and the figures say what either does alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cbatch import Limits, Policy, RunRecord
from cbatch.model import ModelSpec
from experiments.bench.serving import Server, release, same_requests, start, summarize
from experiments.config.assemble import make_model, make_policy
from experiments.config.command_line import Count
from experiments.config.composition import composed, swept, workload
from experiments.config.settings import read_settings
from experiments.store.benchmark_file import spread, write
from experiments.workloads import Workload

LOOPS = {"sync": False, "async": True}


def main(repeats: Count = 3, folder: str = "results") -> None:
    """Measure, print and write loops.json, anew after each executor; the settings are those of conf/experiment/loops.yaml."""
    config, requests = composed("loops"), workload("loops")
    settings, spec, lengths = read_settings(config), make_model(config, {}), config["workload"]["lengths"]
    policy = partial(make_policy, config, settings, {})
    limits = Limits(config["batch"], config["max_tokens"], lengths["max_length"])
    stamped: dict[str, Any] = {
        "model": spec.name,
        "batch": config["batch"],
        "chunk": config["chunk"],
        "requests": requests.num_requests,
        "lengths": [lengths["min_length"], lengths["max_length"]],
        "ratio": lengths["pd_ratio"],
        "figures": {},
    }
    print(
        f"{spec.name}, batch {stamped['batch']}, {stamped['requests']} requests of {lengths['min_length']} to "
        f"{lengths['max_length']} tokens, P:D {lengths['pd_ratio']}, {stamped['chunk']} tokens an iteration"
    )
    for graphs in swept("loops", "runtime.graphs"):
        stamped["figures"] |= measure(spec, limits, requests, policy, graphs, repeats)
        release()
        path = write("loops", torch.cuda.get_device_name(), stamped, Path(folder))
    print(f"written: {path}")


def measure(
    spec: ModelSpec,
    limits: Limits,
    requests: Workload,
    policy: Callable[[], Policy],
    graphs: str,
    repeats: int,
    start: Callable[..., Server] = start,
) -> dict[str, Any]:
    """Figures of both loops on one executor, by "LOOP, graphs GRAPHS"."""
    server = start(spec, limits, graphs=graphs)
    server.serve(policy(), same_requests(limits.max_batch, limits.max_request_tokens // 2, 4, spec.vocab_size))
    found: dict[str, Any] = {}
    for loop, asynchronous in LOOPS.items():
        iteration = server.executor.iteration
        before = iteration.num_eager
        records = [
            server.record(policy(), requests.requests(server.executor.vocabulary), asynchronous=asynchronous)
            for _ in range(repeats)
        ]
        name = f"{loop}, graphs {graphs}"
        found[name] = {
            **figures(records),
            "eager_iterations": (iteration.num_eager - before) // repeats,
            "graphs": iteration.report.num_graphs,
            "capture_seconds": iteration.report.seconds,
        }
        show(name, found[name])
    server.executor.close()
    return found


def figures(records: list[RunRecord]) -> dict[str, Any]:
    served = [summarize(record) for record in records]
    mixed = np.array([step.num_prefill_tokens > 0 for step in records[-1].steps])
    ends = np.array([step.received_at for step in records[-1].steps])
    milliseconds = np.diff(ends, prepend=records[-1].steps[0].planned_at) * 1e3
    return {
        "tokens_per_second": spread([run.tokens_per_second for run in served]),
        "ms_per_iteration": spread([run.milliseconds for run in served]),
        "median_ms": {
            kind: float(np.median(milliseconds[chosen])) if chosen.any() else None
            for kind, chosen in (("mixed", mixed), ("decodes alone", ~mixed))
        },
        "active_share": spread([run.active_share for run in served]),
        "host_ms_per_iteration": spread([run.host_milliseconds for run in served]),
        "iterations": served[-1].iterations,
        "mixed_iterations": int(mixed.sum()),
    }


def show(name: str, found: dict[str, Any]) -> None:
    print(
        f"  {name:22} {found['tokens_per_second']['median']:8.0f} tokens/s  {found['ms_per_iteration']['median']:7.3f} "
        f"ms/iteration, device active {found['active_share']['median']:.2%}, host "
        f"{found['host_ms_per_iteration']['median']:.3f} ms, {found['eager_iterations']} of {found['iterations']} "
        "iterations eager",
        flush=True,
    )
