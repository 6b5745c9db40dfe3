"""Decodes with drafts of n-grams: served on a GPU, and simulated from its profile with the survivals that were measured.

    python -m reproduction.validation drafts hardware=h200                                             # on a GPU
    python -m reproduction.validation drafts measured=reproduction/results/h200/simulated-drafts.json  # simulates its runs again

The text repeats with misprints (`reproduction/repeating.py`). A load's survivals are those of its runs with the most drafts, for every number of
drafts. Two numbers of drafts are decided if they differ by more than any setting did between repeats.
"""

import json
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from cbatch import Request, Server
from cbatch.results.summary import summarize
from experiments.profile.machine import hardware_name
from experiments.settings.compose import compose_run
from experiments.setup.assemble import assemble
from experiments.setup.presets import load_spec
from experiments.store.provenance import write_benchmark
from reproduction import RESULTS, VALIDATION
from reproduction.repeating import Text, write_checkpoint

SETUP = "policy=sarathi_serve chunking=fixed chunk=1024 max_tokens=2048 batch=128 kv_tokens=147456 block_size=128 drafting=fixed"
REQUESTS = {4: 12, 32: 64, 128: 128}
"""By load: how many run at a time."""
TEXT = Text(0, 512, 512, 0.2)
DRAWS = 4
"""Simulations of each run, with other draws of what is accepted; their figures are averaged."""


def server_of(*keys: str) -> Any:
    return assemble(compose_run(*SETUP.split(), *keys), largest=Request(0, TEXT.prompt + TEXT.new - 1, 1)).server


def figures(server: Server, load: int, k: int, vocabulary: int, number: int = 0) -> dict[str, Any]:
    """Serves requests, `load` at a time, with k drafts for each decode, and returns the run's figures."""
    policy = compose_run(*SETUP.split(), f"drafting.k={k}").policy()
    server = replace(server, limits=replace(server.limits, max_batch=load))
    engine = server.engine(policy, TEXT._replace(number=number or REQUESTS[load]).requests(vocabulary))
    record = engine.run()
    steps, summary = record.steps, summarize(record, num_blocks=1, max_batch=1, outcomes=engine.state.drafts.counts)
    seconds, alone = steps[-1].done_at, [step for step in steps if not step.num_prefill_tokens]
    device = float(np.median([step.ended - step.started for step in alone]))
    return {
        "tokens_per_second": sum(request.num_output_tokens for request in record.requests) / seconds,
        "tpot_seconds": summary["tpot_seconds"]["mean"],
        "device_ms": 1e3 * device,
        "ms_per_iteration": 1e3 * float(np.median(np.diff([step.started for step in alone]))),
        **{key: summary.get("drafts", {}).get(key) for key in ("acceptance_length", "survivals")},
    }


def main(
    hardware: str = "h200",
    model: str = "llama-3.1-8b",
    backend: str = "cuda",
    loads: tuple[int, ...] = (4, 32, 128),
    drafts: tuple[int, ...] = (0, 1, 3, 5, 7),
    repeats: int = 2,
    measured: str = "",
    folder: str = RESULTS,
) -> None:
    """Serves and simulates, prints and writes simulated-drafts.json. measured: such a file, whose runs are simulated again; needs no GPU."""
    vocabulary, most = load_spec(model).vocab_size, max(drafts)
    if measured:
        kept: dict[str, Any] = json.loads(Path(measured).read_text(encoding="utf-8"))
        rows, device = kept["runs"], kept["hardware"]
        about = {"measured": kept.get("measured") or {key: kept[key] for key in ("hardware", "date", "commit")}}
    else:
        device, about = hardware_name(backend), {}
        rows = [{"load": load, "k": k} for _, load, k in product(range(repeats), loads, drafts)]
        with TemporaryDirectory() as checkpoint:
            write_checkpoint(load_spec(model), Path(checkpoint), backend)
            keys = f"model.path={checkpoint} drafter=ngram drafter.min_n=1 drafter.max_drafts={most}"
            real = server_of(f"backend={backend}", *keys.split())
        for load, k in product(loads, (0, most)):  # compiles what the first runs would compile
            figures(real, load, k, vocabulary, number=min(load, 16))
        for row in rows:
            row["measured"] = figures(real, row["load"], row["k"], vocabulary)
            print(row, flush=True)
            write_benchmark("simulated-drafts", device, {"model": model, "runs": rows}, folder, VALIDATION)
    for load, k in {(row["load"], row["k"]): None for row in rows}:
        last = [row["measured"] for row in rows if row["load"] == load and row["measured"]["survivals"]][-1]
        keys = f"model={model} hardware={hardware} drafter=survivals drafter.survivals={[*last['survivals'].values()]}"
        runs = [
            figures(server_of("backend=sim", *keys.replace(", ", ",").split(), f"seed={seed}"), load, k, vocabulary)
            for seed in range(DRAWS)
        ]
        of_run = {key: fmean(run[key] for run in runs) for key in runs[0] if key != "survivals" and runs[0][key]}
        for row in rows:
            if (row["load"], row["k"]) == (load, k):
                row["simulated"] = of_run
    print(report(rows))
    about |= {"profile": hardware, "model": model, "runs": rows}
    print(f"written: {write_benchmark('simulated-drafts', device, about, folder, VALIDATION)}")


def report(rows: list[dict[str, Any]]) -> str:
    """Returns a line for each setting, and how often simulation names the better of two numbers of drafts."""
    cells: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["load"], row["k"]), []).append(row)
    lines, right, decided = [], 0, 0
    for (load, k), cell in cells.items():
        parts = []
        for name, simulated in cell[0]["simulated"].items():
            real = fmean(row["measured"][name] for row in cell)
            parts.append(f"{name} {real:.5g} {simulated / real - 1:+.1%}")
        lines.append(f"{load} at a time, {k} drafts: " + ", ".join(parts))
    for name in ("tokens_per_second", "tpot_seconds"):
        real = {place: [row["measured"][name] for row in cell] for place, cell in cells.items()}
        noise = max(max(values) / min(values) - 1 for values in real.values())
        for one, other in combinations(cells, 2):
            apart = fmean(real[one]) / fmean(real[other]) - 1
            if one[0] == other[0] and abs(apart) > noise:
                virtual = cells[one][0]["simulated"][name] / cells[other][0]["simulated"][name] - 1
                decided, right = decided + 1, right + (apart * virtual > 0)
        best = max if name == "tokens_per_second" else min
        for load in dict.fromkeys(load for load, _ in cells):
            of_load = [place for place in cells if place[0] == load]
            named = best(of_load, key=lambda place: cells[place][0]["simulated"][name])
            true = best(of_load, key=lambda place: fmean(real[place]))
            lines.append(f"{name}, {load} at a time: best {true[1]} drafts, simulated {named[1]}")
        lines.append(f"{name}: noise {noise:.1%}")
    return "\n".join([*lines, f"pairs at equal load: {decided} decided, {right} right"])
