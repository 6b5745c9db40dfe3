"""The first requests of a recorded trace, queued at once, under each policy: prompt and output tokens a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cbatch import Limits, Policy
from cbatch.errors import ConfigError
from experiments.bench.serving import same_requests, start
from experiments.config.command_line import Count, beginning_with
from experiments.config.presets import load_spec
from experiments.store.benchmark_file import spread, write
from experiments.workloads import TraceReplay
from policies.chunking import TileAligned
from policies.longest_first import LongestFirst
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

BATCH = 128

POLICIES: dict[str, Callable[[], Policy]] = {
    "sarathi_serve, 512 tokens": lambda: SarathiServe(TileAligned(512)),
    "sarathi_serve, 640 tokens": lambda: SarathiServe(TileAligned(640)),
    "sarathi_serve, 768 tokens": lambda: SarathiServe(TileAligned(768)),
    "sarathi_serve, 1024 tokens": lambda: SarathiServe(TileAligned(1024)),
    "sarathi_serve, 2048 tokens": lambda: SarathiServe(TileAligned(2048)),
    "sarathi, 512 tokens": lambda: Sarathi(TileAligned(512)),
    "longest_first, 512 tokens": lambda: LongestFirst(TileAligned(512)),
    "longest_first, 640 tokens": lambda: LongestFirst(TileAligned(640)),
    "longest_first, 768 tokens": lambda: LongestFirst(TileAligned(768)),
    "longest_first, 1024 tokens": lambda: LongestFirst(TileAligned(1024)),
    "longest per prompt token first, 1024 tokens": lambda: LongestFirst(TileAligned(1024), per_prompt_token=True),
    "longest_first, 1280 tokens": lambda: LongestFirst(TileAligned(1280)),
    "longest_first, 2048 tokens": lambda: LongestFirst(TileAligned(2048)),
    "prefill_first": PrefillFirst,
    "orca": Orca,
}


def main(
    path: str = "",
    model: str = "llama-3.1-8b",
    batch: Count = BATCH,
    requests: Count = 512,
    policies: str = "",
    repeats: Count = 1,
    folder: str = "results",
) -> None:
    """Measure, print and write trace.json, again after each policy; with another batch than 128, trace-<batch>.json.

    `path` is the trace's file; `policies` a list of beginnings of names.
    """
    if not path:
        raise ConfigError("trace: give the trace's file, path=azure_llm_2023_conv.csv.gz")
    chosen = beginning_with("policies", policies, POLICIES)
    spec = load_spec(model)
    workload = TraceReplay(path=path, num_requests=requests, queued=True)
    lengths = workload.requests(None)
    longest = max(request.max_tokens for request in lengths)
    server = start(spec, Limits(batch, 16384, longest))
    server.serve(Orca(), same_requests(batch, 64, 16, spec.vocab_size))
    print(f"{spec.name}, batch {batch}, {len(lengths)} requests of {Path(path).name}: tokens/s")
    figures: dict[str, Any] = {}
    stamped = {
        "trace": Path(path).name,
        "model": spec.name,
        "batch": batch,
        "requests": len(lengths),
        "figures": figures,
    }
    iteration = server.executor.iteration
    for name in chosen:
        before = iteration.num_eager
        runs = [server.serve(POLICIES[name](), workload.requests(server.executor.vocabulary)) for _ in range(repeats)]
        figures[name] = {
            "tokens_per_second": spread([run.tokens_per_second for run in runs]),
            "seconds": spread([run.seconds for run in runs]),
            "iterations": runs[0].iterations,
            "eager": (iteration.num_eager - before) // len(runs),
            "active_share": spread([run.active_share for run in runs]),
        }
        print(
            f"  {name:28} {figures[name]['tokens_per_second']['median']:8.0f}  {runs[0].seconds:6.2f} s, "
            f"{runs[0].iterations} iterations, {figures[name]['eager']} eager, device active {runs[0].active_share:.2%}",
            flush=True,
        )
        written = write(
            f"trace-{batch}" if batch != BATCH else "trace", torch.cuda.get_device_name(), stamped, Path(folder)
        )
    print(f"written: {written}")
