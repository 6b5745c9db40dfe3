"""Prefill and decode apart, against two replicas that do both: served on two GPUs, and simulated from their profile.

    python -m reproduction.validation apart hardware=h200 traces=FOLDER     # on two GPUs; FOLDER has the published traces
    python -m reproduction.validation apart measured=reproduction/results/h200-x2/apart.json traces=FOLDER   # simulates its runs again

Lengths are those of the Azure traces of conversations and code, in random order, arrivals Poisson. A request attains its objectives if its time
to first token and its mean time per further token do.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from cbatch import Request
from cbatch.cluster import LeastLoaded, ReplicatedServer
from cbatch.record import RunRecord
from cbatch.results.metrics import Objectives
from cbatch.results.summary import summarize
from experiments.profile.machine import hardware_name
from experiments.settings.command_line import check_name
from experiments.settings.compose import compose_run
from experiments.setup.assemble import assemble
from experiments.setup.servers import equal_requests
from experiments.store.provenance import write_benchmark
from reproduction import RESULTS, VALIDATION
from reproduction.validation.stored import served_before

LOADS = {"azure_conv_lengths": (12, 24, 36), "azure_code_lengths": (6, 12, 18)}
"""Requests per second, by workload."""

OBJECTIVES = {"strict": Objectives(ttft=0.2, tpot=0.008), "relaxed": Objectives(ttft=0.5, tpot=0.02)}
LAYOUTS = "both", "pull", "push"
LARGEST = Request(0, 8191, 1)
SETUP = "model=llama-3.1-8b policy=sarathi_serve chunk=512 batch=128 max_tokens=2048 kv_tokens=262144 block_size=128 prefix_cache=true"
POOLS = "backend.router=least_loaded backend.pools={p:{role:prefill},d:{role:decode}}"


def server_of(*keys: str) -> ReplicatedServer:
    """Returns a prefiller and a decoder."""
    server = assemble(compose_run(*SETUP.split(), *POOLS.split(), *keys), largest=LARGEST).server
    assert isinstance(server, ReplicatedServer)
    return server


def laid_out(server: ReplicatedServer, layout: str) -> ReplicatedServer:
    """Returns the server whose replicas do both, or pull or push what the prefiller has computed."""
    if layout == "both":
        return replace(server, roles=(), moves=None, router=LeastLoaded())
    assert server.moves is not None
    return replace(server, moves=replace(server.moves, push=layout == "push"))


def figures(server: ReplicatedServer, workload: str, layout: str, vocabulary: Any = None) -> dict[str, Any]:
    """Serves a workload and returns its figures."""
    chosen: Any = compose_run(*SETUP.split(), *workload.split())
    server = laid_out(server, layout)
    record = server.engine(chosen.policy(), chosen.workload.source(vocabulary)).run()
    return _figures(record)


def _figures(record: RunRecord) -> dict[str, Any]:
    found: dict[str, Any] = {"requests": len(record.requests)}
    for name, objectives in OBJECTIVES.items():
        summary = summarize(record, num_blocks=1, max_batch=1, objectives=objectives)
        found[name] = summary["goodput"]["attained_share"]
    for name in ("ttft_seconds", "tpot_seconds"):
        found |= {f"{name} {rank}": summary[name.split("_")[0] + "_seconds"][rank] for rank in ("mean", "p50", "p90")}
    if record.transfers:
        rates = [sent.num_bytes / (sent.ended - sent.started) / 1e9 for sent in record.transfers if sent.num_bytes]
        found |= {
            "transfers": len(rates),
            "GB/s": float(np.median(rates)),
            "GB": sum(sent.num_bytes for sent in record.transfers) / 1e9,
        }
        found["hidden share"] = float(np.mean([sent.hidden for sent in record.transfers]))
        found["visible ms"] = 1e3 * float(np.median([sent.ended - sent.started for sent in record.transfers]))
    return found


def asked(only: str, seeds: int, seconds: float) -> list[dict[str, Any]]:
    """Returns the runs to measure, of each cell with each seed. only: cells such as azure_conv_lengths/36, with commas between, in this order; "": all."""
    known = {f"{name}/{rate}": (name, rate) for name, rates in LOADS.items() for rate in rates}
    rows = []
    for cell, seed, layout in product(only.split(",") if only else known, range(seeds), LAYOUTS):
        check_name("cell", cell, dict.fromkeys(known, ""))
        name, rate = known[cell]
        if layout == "push" and rate != LOADS[name][1]:
            continue
        lengths = "workload.lengths.max_length=8191 workload.lengths.too_long=clip"
        keys = f"workload=traces/{name} workload.arrivals.rate={rate} workload.num_requests={round(rate * seconds)} seed={seed} {lengths}"
        rows.append({"workload": name, "rate": rate, "seed": seed, "layout": layout, "keys": keys})
    return rows


def main(
    hardware: str = "h200",
    measured: str = "",
    traces: str = "",
    seconds: float = 10.0,
    seeds: int = 1,
    only: str = "",
    folder: str = RESULTS,
) -> None:
    """Serves and simulates, prints and writes apart.json, after each served run too. seconds: of arrivals in each run. only: see `asked`.

    measured: such a file; needs no GPU.
    """
    about: dict[str, Any] = {}
    if measured:
        kept, about = served_before(measured)
        rows, device = kept["runs"], kept["hardware"]
    else:
        rows, device = asked(only, seeds, seconds), f"{hardware_name('cuda')} x2"

    def write(runs: list[dict[str, Any]]) -> Path:
        return write_benchmark("apart", device, {**about, "profile": hardware, "runs": runs}, folder, VALIDATION)

    if not measured:
        from cbatch.model.checkpoint import Vocabulary

        real, vocabulary = (
            server_of("backend=cuda", f"hardware={hardware}"),
            Vocabulary(compose_run(*SETUP.split()).model),
        )
        for layout in LAYOUTS:  # compiles what the first run would compile
            laid_out(real, layout).engine(
                compose_run(*SETUP.split()).policy(), equal_requests(64, 300, 16, 32000)
            ).run()
        for number, row in enumerate(rows, 1):
            row["measured"] = figures(real, f"{row['keys']} traces={traces}", row["layout"], vocabulary)
            print(f"{number} of {len(rows)}: {row['keys']} {row['layout']}", flush=True)
            write(rows[:number])
    simulated = server_of("backend=sim", f"hardware={hardware}", "backend.host_seconds=auto")
    for row in rows:
        row["simulated"] = figures(simulated, f"{row['keys']} traces={traces}", row["layout"])
        print(show(row), flush=True)
    print(f"written: {write(rows)}")


def show(row: dict[str, Any]) -> str:
    """Returns a run's line: figures, with the simulated ones behind."""
    real, simulated = row.get("measured", {}), row["simulated"]
    parts = [
        f"{name} {real.get(name, float('nan')):.4g} ({simulated.get(name, float('nan')):.4g})" for name in simulated
    ]
    return f"{row['workload']} {row['rate']}/s, seed {row['seed']}, {row['layout']}: {', '.join(parts)}"
