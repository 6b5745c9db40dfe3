"""Disaggregated prefill and decode, simulated: when it pays on two GPUs, and in which ratio on eight. Llama 3.1 8B, profile of an H100.

    python -m reproduction.papers roles traces=FOLDER [seeds=5] [folder=results]

Requests have the lengths of the Azure traces of 2023 in random order; arrivals are Poisson. A request attains its objectives if its
time to first token and its mean time per further token do. Setups with the same seed serve the same requests: differences are paired.
Rows that folder/roles/runs.csv has already are not simulated again, unless with other tables or links of the profile than today's (column `tables`). All cores simulate.
"""

import hashlib
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from tabulate import tabulate

from cbatch.sim import load_profile
from experiments.api import simulate
from experiments.plots.saving import save
from experiments.plots.style import line_style, new_figure, print_style
from experiments.report.intervals import compare, mean_of
from experiments.report.text import format_mean
from experiments.store.provenance import write_text
from reproduction import RESULTS
from reproduction.papers.jobs import rows_of
from reproduction.parts import legend
from reproduction.validation.compare import tables_of

OBJECTIVES = {"200 ms, 8 ms": (0.2, 0.008), "500 ms, 10 ms": (0.5, 0.01), "500 ms, 20 ms": (0.5, 0.02)}
"""Seconds to the first token, and per further token."""
LOADS: dict[int, dict[str, tuple[int, ...]]] = {
    2: {"conv": (12, 24, 36), "code": (6, 12, 18)},
    8: {"conv": (96,), "code": (48,)},
}
"""Requests per second, by GPUs and workload."""
SECONDS = {2: 20, 8: 10}
"""Seconds of arrivals, by GPUs."""
HARDWARE = "h100"
SETTINGS: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": HARDWARE,
    "batch": 128,
    "chunk": 512,
    "max_tokens": 2048,
    "prefix_cache": True,
    "router": "least_loaded",
    "max_length": 8191,
    "too_long": "clip",
}
KEY = ["gpus", "workload", "rate", "prefillers", "seed"]
NAMES = {"conv": "conversations", "code": "code"}


def main(traces: str, seeds: int = 5, folder: str = RESULTS) -> None:
    """Simulates what is missing, and writes runs.csv, after each run too, roles.png and table.md."""
    place, tables = Path(folder) / "roles", tables_and_links()
    path = place / "runs.csv"
    data = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=[*KEY, "tables", "date"])
    data = data[data["tables"] == tables]
    known = set(map(tuple, data[KEY].to_numpy().tolist()))
    cells = [(gpus, name, rate) for gpus, loads in LOADS.items() for name in loads for rate in loads[name]]
    keys = [(*cell, number, seed) for seed in range(seeds) for cell in cells for number in range(cell[0])]
    jobs = [dict(zip(KEY, key, strict=True)) for key in keys if key not in known]
    for row in rows_of(partial(measure, traces=traces), jobs):
        made = pd.DataFrame([row]).assign(tables=tables, date=f"{datetime.now(UTC):%Y-%m-%d}")
        data = pd.concat([data, made], ignore_index=True)
        write_text(path, data.to_csv(index=False, float_format="%.5g"))
    data = pd.read_csv(path)  # rounded: table and figure are of the file
    print(path, *save(draw(data), place, "roles.png"), write_text(place / "table.md", table(data)), sep="\n")


def tables_and_links() -> str:
    """Returns the digests of the profile's tables and of its links, which decide the times of transfers."""
    profile = load_profile(HARDWARE)
    return f"{tables_of(profile)}-{hashlib.sha256(repr(profile.links).encode()).hexdigest()[:12]}"


def measure(gpus: int, workload: str, rate: int, prefillers: int, seed: int, traces: str) -> dict[str, float]:
    """Returns the share of requests that attain each pair of objectives, and the mean times in seconds. prefillers: 0: all GPUs do both."""
    pools: Any = {
        "p": {"role": "prefill", "replicas": prefillers},
        "d": {"role": "decode", "replicas": gpus - prefillers},
    }
    setup: dict[str, Any] = {"pools": pools} if prefillers else {"replicas": gpus}
    work: Any = {"rate": rate, "requests": rate * SECONDS[gpus], "seed": seed, "traces": traces}
    served = simulate("sarathi_serve", f"traces/azure_{workload}_lengths", **work, **setup, **SETTINGS).requests
    ttft, tpot = served["ttft_seconds"], served["tpot_seconds"].fillna(0.0)
    shares = {text: ((ttft <= first) & (tpot <= each)).mean() for text, (first, each) in OBJECTIVES.items()}
    return shares | {"ttft_seconds": ttft.mean(), "tpot_seconds": served["tpot_seconds"].mean()}


def table(data: pd.DataFrame) -> str:
    """Returns the attained shares on two GPUs in percent, with 95% intervals of the means, and the paired differences in points."""
    rows = []
    for (name, rate), part in data[data["gpus"] == 2].groupby(["workload", "rate"], sort=False):
        both, apart = (part[part["prefillers"] == number].set_index("seed") for number in (0, 1))
        for text in OBJECTIVES:
            means = (mean_of((100 * runs[text]).tolist()) for runs in (both, apart))
            found = compare(both[text].to_dict(), apart[text].to_dict(), paired=True).scaled(100)
            value, low, high = found.difference
            cells = [format_mean(each, is_share=True) for each in means]
            rows.append([NAMES[str(name)], f"{rate}/s", text, *cells, f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"])
    headers = ["lengths", "load", "TTFT, TPOT within", "two of both [%]", "1 + 1 [%]", "difference [points]"]
    return tabulate(rows, headers, "github", disable_numparse=True) + "\n"


@print_style()
def draw(data: pd.DataFrame) -> Figure:
    """Goodput against the ratio of prefillers and decoders of eight GPUs: a panel for each workload, a line for each pair of objectives.

    Error bars are cut at 0 and at the offered rate. The dates are those of the runs shown.
    """
    figure, (axes,) = new_figure(1, len(NAMES), 2.6)
    for panel, (name, title) in zip(axes, NAMES.items(), strict=True):
        runs = data[(data["gpus"] == 8) & (data["workload"] == name)]
        (rate,) = runs["rate"].unique()
        for index, text in enumerate(OBJECTIVES):
            goodput = (runs[text] * runs["rate"]).groupby(runs["prefillers"]).agg(list).map(mean_of)
            style = line_style(index)
            for places, drawn in (
                (slice(1), {**style, "linestyle": "none"}),
                (slice(1, None), {**style, "label": text}),
            ):
                part = goodput.iloc[places]
                ends = [(min(each.half, each.mean), min(each.half, rate - each.mean)) for each in part]
                panel.errorbar(part.index, [each.mean for each in part], [*zip(*ends, strict=True)], capsize=2, **drawn)
        panel.axhline(rate, color="#777777", linewidth=0.7, label="offered")
        panel.set(title=f"{title}, {rate} requests/s", ylim=(0, None), xlabel="prefillers : decoders")
        panel.set_xticks(range(8), ["no\nroles", *(f"{number}:{8 - number}" for number in range(1, 8))])
    axes[0].set_ylabel("goodput [requests/s]")
    shown = data[data["gpus"] == 8]
    model, batch, chunk = (SETTINGS[key] for key in ("model", "batch", "chunk"))
    settings = f"{model}, batch {batch} of each replica, chunk {chunk}, {shown['seed'].nunique()} seeds"
    days = " to ".join(dict.fromkeys([shown["date"].min(), shown["date"].max()]))
    figure.supxlabel(f"SIMULATED with profile {HARDWARE}; {settings}; {days}", fontsize=6, color="#555555")
    legend(figure, [axes[0]], title="TTFT and TPOT within")
    return figure
