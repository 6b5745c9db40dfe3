"""Throughput against the ratio of prompt to output tokens, closed batch: the workload of SARATHI (arXiv 2308.16369, 5.1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cbatch import Limits, Policy
from experiments.bench.serving import start
from experiments.config.command_line import Count, beginning_with
from experiments.config.presets import load_spec
from experiments.store.benchmark_file import spread, write
from experiments.workloads import ClosedBatch
from policies.chunking import Fixed, PDAware, TileAligned
from policies.orca import Orca
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi

POLICIES: dict[str, Callable[[], Policy]] = {
    "request_level": RequestLevel,
    "orca": Orca,
    "sarathi, 128 tokens": lambda: Sarathi(TileAligned(128)),
    "sarathi, 256 tokens": lambda: Sarathi(TileAligned(256)),
    "sarathi, 384 tokens": lambda: Sarathi(TileAligned(384)),
    "sarathi, 512 tokens": lambda: Sarathi(TileAligned(512)),
    "sarathi, chunk found": lambda: Sarathi(PDAware()),
    "sarathi, 128 + decodes": lambda: Sarathi(Fixed(128)),
    "sarathi, 256 + decodes": lambda: Sarathi(Fixed(256)),
    "sarathi, 512 + decodes": lambda: Sarathi(Fixed(512)),
}


def main(
    model: str = "llama-13b",
    batch: Count = 18,
    length: Count = 1024,
    ratios: tuple[float, ...] = (2, 5, 14, 28, 50),
    requests: Count = 144,
    policies: str = "",
    repeats: Count = 1,
    folder: str = "results",
) -> None:
    """Measure, print and write pd.json, anew after each policy. `ratios` are P:D, `policies` beginnings of names, separated
    by ";".
    """
    chosen = beginning_with("policies", policies, POLICIES)
    spec = load_spec(model)
    server = start(spec, Limits(batch, batch * length, length))
    figures: dict[str, Any] = {}
    stamped = {"model": spec.name, "batch": batch, "length": length, "requests": requests, "figures": figures}
    iteration = server.executor.iteration
    for ratio in ratios:
        workload = ClosedBatch(length=length, pd_ratio=ratio, batch=batch, num_requests=requests)
        warm_up = ClosedBatch(length=length, pd_ratio=ratio, batch=batch, num_requests=2)
        print(f"{spec.name}, batch {batch}, {length} tokens a request, P:D {ratio:g}: tokens/s")
        figures[f"{ratio:g}"] = {}
        for name in chosen:
            server.serve(POLICIES[name](), warm_up.requests(server.executor.vocabulary))
            policy = POLICIES[name]()
            runs = [server.serve(policy, workload.requests(server.executor.vocabulary)) for _ in range(repeats)]
            found = {
                "tokens_per_second": spread([run.tokens_per_second for run in runs]),
                "iterations": runs[0].iterations,
            }
            if isinstance(policy, Sarathi) and isinstance(policy.chunking, PDAware):
                found["chunk"] = policy.chunking.total
            figures[f"{ratio:g}"][name] = found
            print(
                f"  {name:24} {found['tokens_per_second']['median']:8.0f}  "  # type: ignore[index]
                f"{runs[0].milliseconds:7.3f} ms/iteration, {runs[0].iterations} iterations",
                flush=True,
            )
            counts = {"replayed": iteration.num_replayed, "eager": iteration.num_eager}
            path = write("pd", torch.cuda.get_device_name(), {**stamped, **counts}, Path(folder))
    print(f"written: {path}")
