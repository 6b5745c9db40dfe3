"""Simulation against a published run: 300 requests served by vLLM, with time stamps, from LLMServingSim.

    python -m reproduction.papers served tables=.../llmservingsim/RTXPRO6000/Llama-3.1-8B_tp1 [host_ms=0] [folder=results]

vLLM 0.19.0 served Llama-3.1-8B on an RTX PRO 6000 (128 requests, 2,048 tokens per iteration). The same requests are
simulated with the layer timings that were published with the run; nothing is fitted to it. Those timings exclude host
time; host_ms adds it to each iteration of a synchronous loop.
"""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from cbatch import ConfigError, KVSize, Limits, Request, Server
from cbatch.errors import ProfileError
from cbatch.results.metrics import collect_served
from cbatch.sim import HostTime, ProfileCost, SimExecutor
from experiments.settings.presets import load_spec
from policies.chunking import TileAligned
from policies.sarathi_serve import SarathiServe
from reproduction import RESULTS
from reproduction.papers.verdicts import write
from reproduction.profiles import convert

BATCH, MAX_TOKENS, BLOCK = 128, 2048, 16  # see the run's meta.json
FIELDS = {
    "prompt": "input_toks",
    "output": "output_toks",
    "arrival": "queued_ts",
    "first": "first_token_ts",
    "last": "last_token_ts",
}
"""The published name of each column."""

Columns = Mapping[str, NDArray[np.float64]]


def main(tables: str, host_ms: float = 0.0, folder: str = RESULTS) -> None:
    """Simulate the run, print measured and simulated metrics, write served.json."""
    if not 0 <= host_ms < 1e3:
        raise ConfigError(f"host_ms={host_ms:g}: give milliseconds of host time per iteration, from 0 to 1000")
    measured = read_run(Path(tables) / "vllm_run" / "requests.jsonl.gz")
    spec = load_spec("llama-3.1-8b")
    cost = ProfileCost(convert(Path(tables), [spec]), spec)
    simulated = simulate(measured, cost, HostTime(host_ms / 1e3))
    real, virtual = figures(measured), figures(simulated)
    rows = [(name, real[name], virtual[name], f"{virtual[name] / real[name] - 1:+.1%}") for name in real]
    print(tabulate(rows, ("", "measured", "simulated", "error"), floatfmt=".4f"))
    errors = {name: virtual[name] / real[name] - 1 for name in real}
    each = float(np.mean(np.abs(_latency(simulated) / _latency(measured) - 1)))
    print(f"end-to-end latency of each request: mean absolute error {each:.1%}")
    result = {"host_ms": host_ms, "measured": real, "simulated": virtual, "error": errors}
    result["mean_absolute_error_of_latency"] = each
    print(f"written: {write('served', result, {'sim': cost.provenance()}, folder)}")


def read_run(path: Path) -> Columns:
    """The served requests in order of arrival; times in seconds since the first arrival.

    Raises:
        ProfileError: the file cannot be read, or lacks a field.
    """
    try:
        with gzip.open(path, "rt") as file:
            rows = [json.loads(line) for line in file]
        columns = {name: np.array([row[key] for row in rows], np.float64) for name, key in FIELDS.items()}
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise ProfileError(f"{path}: cannot read the run: {error!r}; give the published folder, unchanged") from error
    start = columns["arrival"].min()
    return columns | {name: columns[name] - start for name in ("arrival", "first", "last")}


def simulate(run: Columns, cost: ProfileCost, host: HostTime) -> Columns:
    """The same requests, scheduled as vLLM does: a token budget shared by decodes and prompts."""
    lengths = zip(run["prompt"].astype(int).tolist(), run["output"].astype(int).tolist(), strict=True)
    asked = zip(lengths, run["arrival"].tolist(), strict=True)
    requests = [Request(index, *pair, arrival_time=time) for index, (pair, time) in enumerate(asked)]
    longest = max(request.max_tokens for request in requests)
    limits, kv = Limits(BATCH, MAX_TOKENS, longest), KVSize(cost.profile.kv_tokens(cost.spec) // BLOCK, BLOCK)
    server = Server(SimExecutor(cost, host), limits, cost, kv, asynchronous=False)
    done = collect_served(server.serve(SarathiServe(TileAligned(MAX_TOKENS)), requests))
    order = np.argsort(done.id)
    return {**run, "first": done.first_token[order], "last": done.last_token[order]}


def figures(run: Columns) -> dict[str, float]:
    """Latencies in seconds, by name, and output throughput in tokens per second."""
    ttft, tpot = run["first"] - run["arrival"], (run["last"] - run["first"]) / np.maximum(run["output"] - 1, 1)
    total = float(run["last"].max())
    found = {"total time": total, "output throughput": float(run["output"].sum()) / total}
    for name, values in (("TTFT", ttft), ("TPOT", tpot), ("latency", _latency(run))):
        found[f"{name} mean"] = float(values.mean())
        found |= {f"{name} P{rank}": float(np.percentile(values, rank)) for rank in (50, 90, 99)}
    return found


def _latency(run: Columns) -> NDArray[np.float64]:
    return run["last"] - run["arrival"]
