"""Ablation of chunk selection: what each selector costs against an exhaustive sweep of chunks, on three model/GPU pairs.

SARATHI (arXiv 2308.16369, section 5.1.3) finds chunks by sweeping; `pd_aware` chooses by itself, from lengths and the cost
model, as the run goes on. Regret is the throughput lost against the best total of the sweep, all multiples of half a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tabulate import tabulate

from experiments.config.composition import composed, swept_numbers
from experiments.paper.claims import Claim
from experiments.paper.closed_batch import load_of, seconds_per_request
from experiments.paper.machines import TITLES, Machines
from experiments.paper.steady import Load, SteadyState
from experiments.plots.style import fill_style, new_figure
from experiments.plots.style import printed as page
from policies.chunking import ChunkSelector, Fixed, PDAware, TileAligned
from policies.sarathi import Sarathi

EXPERIMENT = "chunk_regret"
HARDWARE = ("a6000", "a100", "h200", "h200-13b")
OTHER_BATCHES = {"a100": 10}
"""Requests at a time where they are not those of the experiment: as many as fit in the paper's Table 4 at 1,024 tokens."""
BOUND = 2.0  # percent
SELECTORS = ("fixed", "tile-aligned", "P:D-aware")
BEST = "best of the sweep"


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Tokens a second of each selector, and of the sweep's best.

    Columns: hardware, series, pd_ratio, chunk (the total it runs at, or for `fixed` without the decodes), value.
    """
    rows = []
    for hardware in HARDWARE:
        if (at := machines.get(hardware)) is None:
            continue
        for ratio in swept_numbers(EXPERIMENT, "workload.pd_ratio"):
            say(f"{hardware}, P:D {ratio:g}")
            load = _load(hardware, ratio)
            rows += [
                (hardware, series, ratio, chunk, load.length / seconds)
                for series, chunk, seconds in _at(at, load, composed(EXPERIMENT)["chunk"])
            ]
    return pd.DataFrame(rows, columns=["hardware", "series", "pd_ratio", "chunk", "value"])


def _load(hardware: str, pd_ratio: float) -> Load:
    load = load_of(EXPERIMENT, pd_ratio)
    return replace(load, batch=OTHER_BATCHES.get(hardware, load.batch))


def _at(at: SteadyState, load: Load, chunk: int) -> list[tuple[str, int, float]]:
    """(selector, chunk, seconds a request) at one load; `chunk` is of those that do not choose."""

    def seconds(selector: ChunkSelector, tile: int | None = None) -> float:
        return seconds_per_request(at.cost, Sarathi(selector), load, tile=tile)

    half = max(at.cost.profile.ceilings.tile // 2, 1)
    totals = [total for total in range(half, load.length + load.batch + half, half) if total >= load.batch]
    sweep = {total: seconds(TileAligned(total), tile=half) for total in totals}
    best = min(sweep, key=lambda total: sweep[total])
    aware = PDAware()
    fixed, aligned, chosen = seconds(Fixed(chunk)), sweep[chunk], seconds(aware)
    return [
        *zip(SELECTORS, (chunk, chunk, aware.total), (fixed, aligned, chosen), strict=True),
        (BEST, best, sweep[best]),
    ]


def regret(data: pd.DataFrame) -> pd.DataFrame:
    """Percent of the best throughput that each selector loses, as `data` with regrets for values."""
    keys = ["hardware", "pd_ratio"]
    best = data[data["series"] == BEST].set_index(keys)["value"].rename("best")
    rest = data[data["series"] != BEST].join(best, on=keys)
    return rest.assign(value=100 * (1 - rest["value"] / rest["best"])).drop(columns="best")


def worst_regret(data: pd.DataFrame, series: str = SELECTORS[2], hardware: str | None = None) -> float:
    """The largest regret of a selector in percent, on all machines or on one."""
    found = regret(data)
    chosen = found[(found["series"] == series) & ((found["hardware"] == hardware) | (hardware is None))]
    return float(chosen["value"].max())


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A panel for each machine: bars by P:D, the chosen and the best chunk below them. The paper prints no regrets."""
    machines = list(dict.fromkeys(data["hardware"]))
    regrets = regret(data)
    with page():
        figure, [panels] = new_figure(1, len(machines), 2.9)
        for panel, hardware in zip(panels, machines, strict=True):
            panel.sharey(panels[0])
            _bars(panel, regrets[regrets["hardware"] == hardware], _chunks(data[data["hardware"] == hardware]))
            panel.set_title(f"{TITLES[hardware]}\nB = {_load(hardware, 1).batch}", loc="left")
            panel.set_xlabel("P:D\nchosen total\n/ best total", fontsize=7)
        panels[0].set_ylabel("throughput lost against\nthe best of the sweep [%]")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _chunks(shown: pd.DataFrame) -> dict[float, str]:
    table = shown.pivot_table(index="pd_ratio", columns="series", values="chunk")
    return {
        ratio: f"{ratio:g}\n{chosen:.0f}\n/{best:.0f}"
        for ratio, chosen, best in zip(table.index, table[SELECTORS[2]], table[BEST], strict=True)
    }


def _bars(panel: Axes, shown: pd.DataFrame, labels: dict[float, str]) -> None:
    table = shown.pivot_table(index="pd_ratio", columns="series", values="value")
    width = 0.8 / len(SELECTORS)
    for index, series in enumerate(SELECTORS):
        places = [place + (index - 1) * width for place in range(len(table))]
        label = series if series == SELECTORS[2] else f"{series}, C = {composed(EXPERIMENT)['chunk']}"
        panel.bar(places, table[series], width, label=label, **fill_style((3, 1, 0)[index]))
    panel.axhline(BOUND, color="black", linewidth=0.7, linestyle=(0, (4, 2)), label=f"{BOUND:g}%")
    panel.set_xticks(range(len(table)), [labels[ratio] for ratio in table.index], fontsize=6.5)
    panel.grid(visible=True, axis="y")


def text(data: pd.DataFrame) -> str:
    """The regrets as a table, in percent."""
    table = regret(data).pivot_table(index=["hardware", "pd_ratio"], columns="series", values="value", sort=False)
    chunks = data[data["series"].isin([SELECTORS[2], BEST])].pivot_table(
        index=["hardware", "pd_ratio"], columns="series", values="chunk", sort=False
    )
    rows = [
        (*key, *(table.at[key, name] for name in SELECTORS), chunks.at[key, SELECTORS[2]], chunks.at[key, BEST])
        for key in table.index
    ]
    head = ("hardware", "P:D", *SELECTORS, "chosen total", "best total")
    return tabulate(rows, head, floatfmt=("", "g", ".2f", ".2f", ".2f", ".0f", ".0f"))
