"""Simulation against a published run: 300 requests served by vLLM, with time stamps, from LLMServingSim.

    python -m reproduction.papers served tables=.../llmservingsim/RTXPRO6000/Llama-3.1-8B_tp1 [host_ms=0] [folder=results]

vLLM 0.19.0 served Llama-3.1-8B on an RTX PRO 6000 (128 requests, 2,048 tokens per iteration). The same requests are
simulated with the layer timings that were published with the run; nothing is fitted to it. Those timings exclude host
time; host_ms adds it to each iteration of a synchronous loop.
"""

from pathlib import Path

import pandas as pd
from tabulate import tabulate

from cbatch import KVSize, Limits, Request, Server
from cbatch.errors import ProfileError
from cbatch.results.metrics import collect_served
from cbatch.sim import HostTime, ProfileCost, SimExecutor
from experiments.settings.presets import load_spec
from policies.chunking import TileAligned
from policies.sarathi_serve import SarathiServe
from reproduction import RESULTS
from reproduction.papers.claims import write
from reproduction.profiles import convert

BATCH, MAX_TOKENS, BLOCK = 128, 2048, 16  # see the run's meta.json
FIELDS = {
    "input_toks": "prompt",
    "output_toks": "output",
    "queued_ts": "arrival",
    "first_token_ts": "first",
    "last_token_ts": "last",
}
"""Our name of each published column."""


def main(tables: str, host_ms: float = 0.0, folder: str = RESULTS) -> None:
    """Simulates the run, prints measured and simulated metrics, writes served.json."""
    measured, spec = read_run(Path(tables) / "vllm_run" / "requests.jsonl.gz"), load_spec("llama-3.1-8b")
    cost = ProfileCost(convert(Path(tables), [spec]), spec)
    simulated = simulate(measured, cost, HostTime(host_ms / 1e3))
    real, virtual = figures(measured), figures(simulated)
    errors = {name: virtual[name] / real[name] - 1 for name in real}
    rows = [(name, real[name], virtual[name], f"{errors[name]:+.1%}") for name in real]
    print(tabulate(rows, ("", "measured", "simulated", "error"), floatfmt=".4f"))
    latency, ours = (run["last"] - run["arrival"] for run in (measured, simulated))
    each = float((ours / latency - 1).abs().mean())
    print(f"end-to-end latency of each request: mean absolute error {each:.1%}")
    result = {"host_ms": host_ms, "measured": real, "simulated": virtual, "error": errors}
    result["mean_absolute_error_of_latency"] = each
    print(f"written: {write('served', result, {'sim': cost.provenance()}, folder)}")


def read_run(path: Path) -> pd.DataFrame:
    """Returns the served requests in order of arrival, a row for each; times in seconds since the first arrival.

    Raises:
        ProfileError: the file cannot be read, or lacks a field.
    """
    try:
        run = pd.read_json(path, lines=True)[[*FIELDS]].rename(columns=FIELDS)
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise ProfileError(f"{path}: cannot read the run: {error!r}; give the published folder, unchanged") from error
    times = ["arrival", "first", "last"]
    run[times] -= run["arrival"].min()
    return run


def simulate(run: pd.DataFrame, cost: ProfileCost, host: HostTime) -> pd.DataFrame:
    """Returns the same requests, scheduled as vLLM does: a token budget shared by decodes and prompts."""
    rows = run[["prompt", "output", "arrival"]].itertuples()
    requests = [Request(id_, int(prompt), int(output), arrival_time=time) for id_, prompt, output, time in rows]
    longest = max(request.max_tokens for request in requests)
    limits, kv = Limits(BATCH, MAX_TOKENS, longest), KVSize(cost.profile.kv_tokens(cost.spec) // BLOCK, BLOCK)
    server = Server(SimExecutor(cost, host), limits, cost, kv, asynchronous=False)
    done = collect_served(server.serve(SarathiServe(TileAligned(MAX_TOKENS)), requests))
    ends = pd.DataFrame({"first": done.first_token, "last": done.last_token}, index=done.id)
    return run.assign(first=ends["first"], last=ends["last"])


def figures(run: pd.DataFrame) -> dict[str, float]:
    """Returns latencies in seconds, by name, and output throughput in tokens per second."""
    total = float(run["last"].max())
    found = {"total time": total, "output throughput": float(run["output"].sum()) / total}
    kinds = {"TTFT": run["first"] - run["arrival"], "latency": run["last"] - run["arrival"]}
    kinds["TPOT"] = (run["last"] - run["first"]) / (run["output"] - 1).clip(lower=1)
    for name, values in kinds.items():
        found[f"{name} mean"] = float(values.mean())
        found |= {f"{name} P{rank}": float(values.quantile(rank / 100)) for rank in (50, 90, 99)}
    return found
