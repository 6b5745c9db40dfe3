"""The way of a request from the GPU of its prefill to that of its decodes, by how its KV cache is sent: served on two GPUs, and simulated.

    python -m reproduction.validation handover hardware=h200     # on two GPUs; devices=0,0: on one, which both share
    python -m reproduction.validation handover measured=reproduction/results/h200-x2/handover.json   # simulates its runs again

pull: after the prefill. push: after each chunk of the prompt, beside the next chunk. layers: by each layer, as it computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import nan
from typing import Any

import numpy as np
from tabulate import tabulate

from cbatch import Request
from cbatch.cluster import ReplicatedServer
from cbatch.record import RunRecord
from experiments.profile.machine import hardware_name
from experiments.settings.compose import compose_run
from experiments.setup.servers import equal_requests
from experiments.store.provenance import write_benchmark
from reproduction import RESULTS, VALIDATION
from reproduction.validation.apart import SETUP, laid_out, server_of
from reproduction.validation.stored import served_before

LOADS = {
    "2,000 alone": (2000, 2000, 8, 0.3),
    "8,000 alone": (8000, 8000, 4, 0.6),
    "1,024 to 2,048 at 14/s": (1024, 2048, 40, 1 / 14),
}
"""The shortest and the longest prompt, the number of prompts, and the mean seconds between arrivals: equal if alone, else exponential."""

CASES = ("2,000 alone", 512), ("2,000 alone", 2048), ("8,000 alone", 512), ("1,024 to 2,048 at 14/s", 512)
"""Loads, and the tokens of a chunk."""

LAYOUTS = "pull", "push", "layers"
OUTPUT, PREFILLER = 64, 0

WAY = "first token to plan", "plan to launch", "launch to begin", "computing", "end to second token"
"""Parts of the time from the first token to the second: the decoder plans the iteration with the rest of the prompt, its device begins to compute it, ..."""


def requests_of(load: str) -> list[Request]:
    shortest, longest, number, gap = LOADS[load]
    draw = np.random.default_rng(0)
    gaps = np.full(number, gap) if shortest == longest else draw.exponential(gap, number)
    lengths = draw.integers(shortest, longest + 1, number).tolist()
    return [
        Request(id_, length, OUTPUT, prompt=draw.integers(0, 32000, length).tolist(), arrival_time=float(at))
        for id_, (length, at) in enumerate(zip(lengths, gaps.cumsum(), strict=True))
    ]


def figures(server: ReplicatedServer, load: str, layout: str, chunk: int) -> dict[str, float]:
    """Serves a load and returns medians in ms, and the mean share of bytes sent before the first token."""
    policy = compose_run(*SETUP.split(), f"chunk={chunk}").policy()
    return _figures(laid_out(server, layout).engine(policy, requests_of(load)).run())


def _figures(record: RunRecord) -> dict[str, float]:
    ids, times = record.tokens()
    tokens = [times[ids == request.id] - request.arrival_time for request in record.requests]
    ms = {
        "first token": [each[0] for each in tokens],
        "first to second token": [each[1] - each[0] for each in tokens],
        "second to third token": [each[2] - each[1] for each in tokens],
        "time per token": [(each[-1] - each[1]) / (len(each) - 2) for each in tokens],
        "transfer after the first token": [sent.ended - sent.started for sent in record.transfers],
    }
    ms |= zip(WAY, map(list, zip(*_ways(record), strict=True)), strict=True)
    hidden = float(np.mean([sent.hidden for sent in record.transfers]))
    return {name: 1e3 * float(np.median(seconds)) for name, seconds in ms.items()} | {"hidden share": hidden}


def _ways(record: RunRecord) -> Iterator[list[float]]:
    """Yields the seconds of each part of `WAY` for each request."""
    ids, times = record.tokens()
    steps = [*zip(record.steps, record.replicas, record.receivers, strict=True)]
    first = {id_: step for step, replica, to in reversed(steps) for id_ in to.tolist() if replica != PREFILLER}
    for request in record.requests:
        step, (token, second, *_) = first[request.id], times[ids == request.id]
        at = np.array([token, step.planned_at, step.launched_at, step.started, step.ended, second])
        yield np.diff(at).tolist()


def main(hardware: str = "h200", measured: str = "", folder: str = RESULTS, devices: str = "0,1") -> None:
    """Serves and simulates, prints and writes handover.json, after each load too.

    measured: such a file, simulated again; needs no GPU. devices: the GPU of the prefiller and that of the decoder. Simulation has two.
    """
    simulated = server_of("backend=sim", "backend.host_seconds=auto", hardware=[hardware] * 2)
    about: dict[str, Any] = {}
    if measured:
        kept, about = served_before(measured)
        rows, device = kept["runs"], kept["hardware"]
    else:
        rows = [{"prompts": load, "chunk": chunk, "layout": each} for (load, chunk), each in product(CASES, LAYOUTS)]
        device = hardware_name("cuda") + " x2" * (len({*devices.split(",")}) > 1)
        real = server_of("backend=cuda", f"backend.devices=[{devices}]", hardware=[hardware] * 2)
        for layout in LAYOUTS:  # compiles what the first run would compile
            laid_out(real, layout).engine(compose_run(*SETUP.split()).policy(), equal_requests(8, 900, 16, 32000)).run()
    for number, row in enumerate(rows, 1):
        case = row["prompts"], row["layout"], row["chunk"]
        if not measured:
            row["measured"] = figures(real, *case)
        row["simulated"] = figures(simulated, *case)
        real = row["measured"]
        pairs = (f"{name} {real.get(name, nan):.2f} ({value:.2f})" for name, value in row["simulated"].items())
        print(f"prompts of {case[0]}, chunks of {case[2]}, {case[1]}: {', '.join(pairs)}", flush=True)
        content = {**about, "profile": hardware, "runs": rows if measured else rows[:number]}
        path = write_benchmark("handover", device, content, folder, VALIDATION)
    print(table(rows), way(rows), f"written: {path}", sep="\n")


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row for each load and chunk, each figure by layout, the simulated ones in brackets. runs: with the layouts of a case in a row."""
    shown = {
        "left after the prefill [ms]": ("transfer after the first token", 1),
        "first to second token [ms]": ("first to second token", 1),
        "first token [ms]": ("first token", 0),
    }
    heads = [f"{text}: {layout}" if layout == LAYOUTS[0] else layout for text in shown for layout in LAYOUTS]
    rows: dict[str, list[str]] = {}
    for (name, digits), run in product(shown.values(), runs):
        pair = (f"{run[kind][name]:.{digits}f}" for kind in ("measured", "simulated"))
        rows.setdefault(f"{run['prompts']}, {run['chunk']}", []).append("{} ({})".format(*pair))
    cells = [[name, *texts] for name, texts in rows.items()]
    return tabulate(cells, ["prompts, tokens of a chunk", *heads], "github", disable_numparse=True) + "\n"


def way(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the parts of the time from the first token to the second, a row for each run that has them, the simulated ones in brackets."""
    rows = []
    for run in (run for run in runs if WAY[0] in run["measured"]):
        pairs = [f"{run['measured'][name]:.2f} ({run['simulated'][name]:.2f})" for name in WAY]
        rows.append([f"{run['prompts']}, {run['chunk']}, {run['layout']}", *pairs])
    heads = ["prompts, tokens of a chunk", *(f"{name} [ms]" for name in WAY)]
    return tabulate(rows, heads, "github", disable_numparse=True) + "\n"
