"""`vllm bench serve` against two servers of the same model at once, each on a GPU of its own: vLLM's and ours.

    vllm serve FOLDER --served-model-name llama-3.1-8b --load-format dummy --max-num-seqs 256 --max-num-batched-tokens 2048 \
        --max-model-len 4096 --no-enable-prefix-caching --port 8000                                             # on the first GPU
    python -m experiments.server backend=cuda model=llama-3.1-8b policy=sarathi_serve chunk=2048 batch=256 max_tokens=2048 \
        max_request_tokens=4096 port=8001 output=FOLDER                                                         # on the second
    python -m reproduction.bench door tokenizer=FOLDER path=TRACE ports=8000,8001

`tokenizer` is a folder that this benchmark fills with the model's shape and a tokenizer of which every token is a word; vLLM serves it, so
start the benchmark with `only_write=on` first. Requests have the lengths of the trace's first rows that fit, and arrive at random (Poisson) at shares
of the capacity: the requests per second that the first server completes when all come at once. With a single GPU, start and measure one server
after the other (`ports=8000 names=vLLM`), the second with the `capacity` that the first had.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tabulate import tabulate

from cbatch import ConfigError
from cbatch.validation import Switch
from experiments.settings.command_line import Count
from experiments.setup.presets import load_spec
from experiments.store.provenance import write_benchmark
from experiments.workloads import TraceReplay
from reproduction import BENCH, RESULTS
from reproduction.bench.in_vllm.client import arguments, figures_of, write_lengths
from reproduction.bench.in_vllm.model import LONGEST, write_model
from reproduction.bench.peers.measure import graphics_card

SHOWN = ("request_throughput", *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "e2el") for kind in ("mean", "p99")))


def main(
    tokenizer: str,
    path: str = "",
    ports: tuple[Count, ...] = (8000, 8001),
    names: tuple[str, ...] = ("vLLM", "cbatch"),
    shares: tuple[float, ...] = (0.6, 0.9),
    seconds: Count = 30,
    queued: Count = 512,
    capacity: float = 0.0,
    model: str = "llama-3.1-8b",
    only_write: Switch = False,
    name: str = "door",
    folder: str = RESULTS,
) -> None:
    """Measures and prints; writes NAME.json after each load.

    queued: requests that come at once. capacity: requests per second; 0: those that the first server completes of these.
    """
    spec, where = load_spec(model), Path(tokenizer)
    if not where.is_dir() or only_write:
        write_model(spec, where)
    if only_write:
        return
    if not path:
        raise ConfigError("door: give the trace's file, path=azure_llm_2023_conv.csv.gz")
    drawn = TraceReplay(path=path, max_length=LONGEST, too_long="drop", queued=True).requests(None)
    lengths = [(each.num_prompt_tokens, each.max_new_tokens) for each in islice(drawn, 4 * queued)]
    hardware, driver = graphics_card()
    figures: dict[str, dict[str, Any]] = {}
    rate, loads = float("inf"), {"queued": 0.0, **{f"{share:.0%}": share for share in shares}}
    for load, share in loads.items():
        if share:
            rate = share * (capacity or figures["queued"][names[0]]["request_throughput"])
        number = queued if not share else round(rate * seconds)
        clients = [_start(where, model, port, lengths[:number], rate) for port in ports]
        figures[load] = {name: _result(*client) for name, client in zip(names, clients, strict=True)}
        rows = [(name, *(found[key] for key in SHOWN)) for name, found in figures[load].items()]
        print(tabulate(rows, (load, *SHOWN), floatfmt=".4g"), flush=True)
        written = write_benchmark(
            name, hardware, {"driver": driver, "trace": Path(path).name, "figures": figures}, folder, BENCH
        )
    print(f"written: {written}")


def _start(
    folder: Path, model: str, port: int, lengths: Sequence[tuple[int, int]], rate: float
) -> tuple[subprocess.Popen[bytes], Path]:
    """Starts a client; returns its process and the file of its results."""
    result = folder / f"result-{port}.json"
    result.unlink(missing_ok=True)
    options = write_lengths(folder / f"asked-{port}.jsonl", lengths)
    options |= {"model": model, "tokenizer": folder, "request-rate": rate}
    options |= {"result-dir": folder, "result-filename": result.name}
    words = [*arguments(folder, port, len(lengths), options), "--save-result"]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL), result


def _result(client: subprocess.Popen[bytes], path: Path) -> dict[str, float]:
    if client.wait() or not path.is_file():
        raise ConfigError(f"door: {path.stem} has no result of vllm bench serve; look at the client's error above")
    result = json.loads(path.read_text())
    if result["failed"]:
        raise ConfigError(f"door: {result['failed']} requests of {path.stem} have failed")
    return figures_of(result)
