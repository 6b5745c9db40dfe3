"""Whole simulated runs, each a process of `experiments.run`: time and memory from a cold start to the last table.

    python -m reproduction.profiles tables=.../vidur/compute/a100 model=llama-2-70b output=vidur-a100.json
    python -m reproduction.bench vidur path=.../azure_llm_2023_conv... hardware=vidur-a100.json
    python -m reproduction.bench million path=.../servegen_..._trace.csv.gz dataset=.../servegen_..._dataset.jsonl.gz

`vidur`: the workload on which Vidur (Agrawal et al., MLSys 2024) was timed. Llama-2-70B on two A100s from Vidur's own tables, Sarathi with 512
tokens per iteration, at most 128 requests in it, Poisson arrivals of 2/s, conversation lengths clipped to 4,096 tokens. The KV cache is what
Vidur's memory plan leaves beside the weights: 13 requests of 4,096 tokens.
`million`: a million requests of ServeGen through one policy, results streamed. Llama-3.1-8B on an H200, at most 256 requests in an iteration.

CPU seconds are printed besides wall seconds, as other work on the machine lengthens only the latter.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

from tabulate import tabulate

from cbatch import ConfigError
from cbatch.validation import positive
from experiments.settings.command_line import Count
from experiments.settings.this_machine import cpu_name
from experiments.store.benchmark_file import spread
from reproduction import RESULTS
from reproduction.stored import write

OF_VIDUR = (
    f"policy=sarathi_serve chunking=tile_aligned chunk=512 batch=128 kv_tokens={13 * 4096} model=llama-2-70b "
    "backend=sim backend.tensor_parallel=2 workload=sharegpt workload.arrivals.rate=2.0 workload.lengths.format=auto "
    "workload.lengths.order=random workload.lengths.max_length=4096 workload.lengths.too_long=clip progress=off"
).split()
VIDUR = {
    "version": "7d47513",
    "iterations": 26_121,
    "requests_per_second_in_loop": 1_300,
    "seconds": {"event loop": 3.8, "process, every output off": 7.5, "process, default outputs": 24.7},
    "seconds_of_training_before_the_first_run": 1_365,
    "peak_memory_mb": 1_400,
}
"""Vidur on this workload, on 2 cores of the same kind; entered by hand."""
OUTPUTS = {"tables": ("timeline=false",), "tables and timeline": ()}
"""Options by what the process writes; Vidur's default outputs include a timeline."""

OF_A_MILLION = [
    "chunk=1024",
    "batch=256",
    "max_tokens=16384",
    "model=llama-3.1-8b",
    "hardware=h200",
    "backend=sim",
    "workload=servegen",
    "stream=on",
    "progress=off",
]


class Process(NamedTuple):
    """Cost of one process. cpu_seconds: user and system. peak_memory_mb: resident."""

    wall_seconds: float
    cpu_seconds: float
    peak_memory_mb: float


def vidur(path: str, hardware: str, num_requests: Count = 5000, repeats: Count = 5, folder: str = RESULTS) -> None:
    """Measures, prints and writes vidur.json."""
    setting = [
        *OF_VIDUR,
        f"workload.num_requests={num_requests}",
        f"workload.lengths.path={path}",
        f"hardware={hardware}",
    ]
    figures, rows = {}, []
    for outputs, options in OUTPUTS.items():
        runs = [measured([*setting, *options]) for _ in range(repeats)]
        costs = {name: spread([getattr(cost, name) for cost, _ in runs]) for name in Process._fields}
        of_run = runs[-1][1]["run"]
        rates = {
            f"{what}_per_cpu_second": of_run[what] / costs["cpu_seconds"]["median"]
            for what in ("iterations", "requests")
        }
        figures[outputs] = {
            **costs,
            "iterations": of_run["iterations"],
            "simulated_seconds": of_run["seconds"],
            **rates,
        }
        rows += [(outputs, name, found["median"], found["min"], found["max"]) for name, found in costs.items()]
    print(f"{of_run['iterations']} iterations ({VIDUR['iterations']} for 5,000 requests in Vidur)\n")
    print(tabulate(rows, ("process that writes", "", "median", "least", "most"), floatfmt=".2f"))
    content = {"setting": OF_VIDUR, "figures": figures, "vidur": VIDUR}
    print(f"written: {write('vidur', cpu_name(), content, folder)}")


def million(
    path: str,
    dataset: str,
    policy: str = "sarathi_serve",
    num_requests: Count = 1_000_000,
    rate: Annotated[float, positive("requests per second")] = 30.0,
    folder: str = RESULTS,
) -> None:
    """Serves, prints and writes million.json. rate: requests per second."""
    duration = 1.05 * num_requests / rate + 1200  # seconds of data; chance and bursts leave enough
    drawn = {"path": path, "dataset": dataset, "duration": duration, "rate": rate, "num_requests": num_requests}
    process, summary = measured([f"policy={policy}", *OF_A_MILLION, *(f"workload.{key}={drawn[key]}" for key in drawn)])
    run = summary["run"]
    figures = {
        "policy": policy,
        "requests": run["requests"],
        "requests_per_second": rate,
        "iterations": run["iterations"],
        "generated_tokens": round(summary["throughput"]["decode_tokens_per_second"] * run["counted_seconds"]),
        "simulated_seconds": run["seconds"],
        **process._asdict(),
    }
    print(tabulate(figures.items(), floatfmt=",.1f", intfmt=","))
    seconds = {name: values for name, values in summary.items() if name.endswith("_seconds")}
    print(f"written: {write('million', cpu_name(), {'figures': figures, 'seconds': seconds}, folder)}")


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
