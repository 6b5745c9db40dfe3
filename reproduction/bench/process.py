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
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from tabulate import tabulate

from cbatch import ConfigError
from cbatch.validation import positive
from experiments.settings.command_line import Count
from experiments.settings.hardware import cpu_name
from experiments.store.provenance import spread, write_benchmark
from reproduction import BENCH, RESULTS

OF_VIDUR = (
    f"policy=sarathi_serve chunking=tile_aligned chunk=512 batch=128 kv_tokens={13 * 4096} model=llama-2-70b "
    "backend=sim backend.tensor_parallel=2 workload=sharegpt workload.arrivals.rate=2.0 workload.lengths.format=auto "
    "workload.lengths.order=random workload.lengths.max_length=4096 workload.lengths.too_long=clip timeline=false"
)
OF_A_MILLION = (
    "chunk=1024 batch=256 max_tokens=16384 model=llama-3.1-8b hardware=h200 backend=sim workload=servegen stream=on"
)


def vidur(path: str, hardware: str, num_requests: Count = 5000, repeats: Count = 5, folder: str = RESULTS) -> None:
    """Measures, prints and writes vidur.json."""
    keys = {"workload.num_requests": num_requests, "workload.lengths.path": path, "hardware": hardware}
    _measure("vidur", OF_VIDUR, keys, repeats, folder)


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
    keys = {"policy": policy, **{f"workload.{key}": value for key, value in drawn.items()}}
    _measure("million", OF_A_MILLION, keys, 1, folder)


def _measure(name: str, settings: str, keys: Mapping[str, Any], repeats: int, folder: str) -> None:
    arguments = [*settings.split(), "progress=off", *(f"{key}={value}" for key, value in keys.items())]
    costs, summaries = zip(*(measured(arguments) for _ in range(repeats)), strict=True)
    run, throughput = summaries[-1]["run"], summaries[-1]["throughput"]
    figures: dict[str, Any] = {cost: spread([each[cost] for each in costs]) for cost in costs[0]}
    figures |= {"requests": run["requests"], "iterations": run["iterations"], "simulated_seconds": run["seconds"]}
    figures["generated_tokens"] = round(throughput["decode_tokens_per_second"] * run["counted_seconds"])
    rows = [(key, *(value.values() if isinstance(value, dict) else (value,))) for key, value in figures.items()]
    print(tabulate(rows, ("one process", "median", "least", "most", "runs"), floatfmt=",.2f", intfmt=","))
    print(f"written: {write_benchmark(name, cpu_name(), {'setting': settings, 'figures': figures}, folder, BENCH)}")


def measured(arguments: Sequence[str]) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns the cost of a new process of `experiments.run`, and the run's summary.

    Cost: wall seconds, CPU seconds of user and system, and the peak of resident megabytes.

    Raises:
        ConfigError: the run failed; with its message.
    """
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
    cost = {"wall_seconds": wall, "cpu_seconds": usage.ru_utime + usage.ru_stime}
    return cost | {"peak_memory_mb": usage.ru_maxrss * 1024 / 1e6}, summary
