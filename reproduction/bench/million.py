"""A million requests of ServeGen through one policy, as one process of `experiments.run`: time and memory, results streamed.

    python -m reproduction.bench million trace=.../servegen_..._trace.csv.gz dataset=.../servegen_..._dataset.jsonl.gz
                                        [policy=sarathi_serve] [num_requests=1000000] [rate=30] [folder=results]

Llama-3.1-8B on an H200 as the profile h200 measured it, at most 256 requests in an iteration, 1,024 tokens for policies that
take a chunk.
"""

from typing import Annotated

from cbatch.validation import positive
from experiments.settings.command_line import Count
from experiments.settings.this_machine import cpu_name
from reproduction import RESULTS
from reproduction.bench.vidur import measured
from reproduction.stored import write

SETTING = [
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


def main(
    trace: str,
    dataset: str,
    policy: str = "sarathi_serve",
    num_requests: Count = 1_000_000,
    rate: Annotated[float, positive("requests per second")] = 30.0,
    folder: str = RESULTS,
) -> None:
    """Serves, prints and writes million.json. rate: requests per second."""
    drawn = {
        "path": trace,
        "dataset": dataset,
        "duration": 1.05 * num_requests / rate + 1200,  # seconds of data; chance and bursts leave enough
        "rate": rate,
        "num_requests": num_requests,
    }
    process, summary = measured([f"policy={policy}", *SETTING, *(f"workload.{key}={drawn[key]}" for key in drawn)])
    run = summary["run"]
    figures = {
        "policy": policy,
        "requests": run["requests"],
        "requests_per_second": rate,
        "iterations": run["iterations"],
        "generated_tokens": round(summary["throughput"]["decode_tokens_per_second"] * run["counted_seconds"]),
        "simulated_seconds": run["seconds"],
        "cpu_seconds": process.cpu,
        "wall_seconds": process.wall,
        "peak_memory_mb": process.memory,
    }
    for name, value in figures.items():
        shown = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        print(f"  {name:24} {shown}")
    seconds = {name: values for name, values in summary.items() if name.endswith("_seconds")}
    print(f"written: {write('million', cpu_name(), {'figures': figures, 'seconds': seconds}, folder)}")
