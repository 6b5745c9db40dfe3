"""A whole simulated run as one process: the workload on which Vidur (Agrawal et al., MLSys 2024) was timed.

    python -m reproduction.bench vidur path=.../azure_llm_2023_conv... tables=.../vidur/compute/a100
                                      [num_requests=5000] [repeats=5] [folder=results]

Llama-2-70B on two A100s from Vidur's own tables, Sarathi with 512 tokens per iteration, at most 128 requests in it,
Poisson arrivals of 2/s; conversation lengths drawn at random from a trace and clipped to 4,096 tokens. The KV cache is
what Vidur's memory plan leaves beside the weights: 13 requests of 4,096 tokens.

Each process starts cold: interpreter, configuration, profile, trace, simulation, result tables. CPU seconds are
printed besides wall seconds, as other work on the machine lengthens only the latter.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tabulate import tabulate

from cbatch import ConfigError
from experiments.settings.command_line import Count
from experiments.settings.this_machine import cpu_name
from experiments.store.benchmark_file import spread
from reproduction import RESULTS
from reproduction.stored import write

SETTING = (
    f"policy=sarathi_serve chunking=tile_aligned chunk=512 batch=128 kv_tokens={13 * 4096} model=llama-2-70b "
    "backend=sim backend.tensor_parallel=2 workload=sharegpt workload.arrivals.rate=2.0 workload.lengths.format=auto "
    "workload.lengths.order=random workload.lengths.max_length=4096 workload.lengths.too_long=clip progress=off"
).split()

OUTPUTS = {"tables": ("timeline=false",), "tables and timeline": ()}
"""Options by what the process writes; Vidur's default outputs include a timeline."""

VIDUR = {
    "version": "7d47513",
    "iterations": 26_121,
    "requests_per_second_in_loop": 1_300,
    "seconds": {"event loop": 3.8, "process, every output off": 7.5, "process, default outputs": 24.7},
    "seconds_of_training_before_the_first_run": 1_365,
    "peak_memory_mb": 1_400,
}
"""Vidur on this workload, on 2 cores of the same kind; entered by hand."""


class Process(NamedTuple):
    """Cost of one process. cpu: user and system seconds. memory: peak resident, in MB."""

    wall: float
    cpu: float
    memory: float


def main(path: str, tables: str, num_requests: Count = 5000, repeats: Count = 5, folder: str = RESULTS) -> None:
    """Measures, prints and writes vidur.json."""
    setting = (*SETTING, f"workload.num_requests={num_requests}", f"workload.lengths.path={path}", f"hardware={tables}")
    figures, rows = {}, []
    for outputs, options in OUTPUTS.items():
        runs = []
        for repeat in range(repeats):
            run, summary = measured((*setting, *options))
            runs.append(run)
            cost = f"{run.wall:.2f} s, of them {run.cpu:.2f} s of a core, {run.memory:.0f} MB"
            print(f"  {outputs}, {repeat + 1} of {repeats}: {cost}", flush=True)
        figures[outputs] = _figures(runs, summary)
        spreads = {name: values for name, values in figures[outputs].items() if isinstance(values, dict)}
        rows += [(outputs, name, found["median"], found["min"], found["max"]) for name, found in spreads.items()]
    served = f"{summary['about']['requests']} requests, {summary['run']['iterations']} iterations"
    print(f"\n{served} ({VIDUR['iterations']} for 5,000 in Vidur)\n")
    print(tabulate(rows, ("process that writes", "", "median", "least", "most"), floatfmt=".2f"))
    content = {"setting": SETTING, "figures": figures, "vidur": VIDUR}
    print(f"written: {write('vidur', cpu_name(), content, folder)}")


def measured(arguments: Sequence[str]) -> tuple[Process, dict[str, Any]]:
    """Returns the cost of a new process of `experiments.run` and its summary; raises ConfigError with its message."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        with (Path(folder) / "errors").open("w+") as errors:
            command = [sys.executable, "-m", "experiments.run", *arguments, f"output={output}"]
            kept = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # modules are compiled once, as they are by default
            began = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=kept)
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - began
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                errors.seek(0)
                message = errors.read().strip().removeprefix("error: ")
                raise ConfigError(message or "the process was killed; free memory")
        summary = json.loads((output / "summary.json").read_text())
    return Process(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6), summary


def _figures(runs: Sequence[Process], summary: dict[str, Any]) -> dict[str, Any]:
    iterations, simulated = summary["run"]["iterations"], summary["run"]["seconds"]
    cpu = spread([run.cpu for run in runs])
    return {
        "wall_seconds": spread([run.wall for run in runs]),
        "cpu_seconds": cpu,
        "peak_memory_mb": spread([run.memory for run in runs]),
        "iterations": iterations,
        "simulated_seconds": simulated,
        "iterations_per_cpu_second": iterations / cpu["median"],
        "requests_per_cpu_second": summary["run"]["requests"] / cpu["median"],
    }
