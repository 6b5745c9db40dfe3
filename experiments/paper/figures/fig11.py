"""Fig 11 of SARATHI (arXiv 2308.16369): throughput over the baseline's against P:D, chunks of 256 beside Orca's best and worst case.

Orca's iterations hold whole prompts. In its best case starts are spread evenly, so that every prompt meets decodes; in its
worst case all requests start together, and it does what the baseline does. The best case is Sarathi with chunks as long as
the prompts, and so its peak lies at a much higher P:D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple

from experiments.paper.claims import Claim
from experiments.paper.machines import TITLES, Machines
from experiments.paper.panels import PANELS, Panel, pd_axis, ratios
from experiments.paper.steady import Load, Scheme
from experiments.plots.style import fill_style, line_style, new_figure, paper_style
from experiments.plots.style import printed as page

CHUNK = 256
SCHEMES: dict[str, Scheme] = {
    "Orca, worst case": "orca_worst",
    "Orca, best case": "orca_best",
    "Sarathi, C = 256": "sarathi",
}
HARDWARE = ("a6000", "h200-13b", "gpu")


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Throughput over the baseline's.

    Columns: hardware, series, length, batch, pd_ratio, value.
    """
    rows = []
    for hardware in HARDWARE:
        if (at := machines.get(hardware)) is None:
            continue
        for panel in PANELS:
            say(f"{hardware}, {panel.title}")
            rows += [
                (hardware, series, *panel, ratio, at.gain(scheme, Load(*panel, ratio), CHUNK))
                for series, scheme in SCHEMES.items()
                for ratio in ratios(panel, CHUNK, real=machines.are_real)
            ]
    return pd.DataFrame(rows, columns=["hardware", "series", "length", "batch", "pd_ratio", "value"])


def best_gain(data: pd.DataFrame, hardware: str, scheme: Scheme, length: int = 1024) -> float:
    """The highest gain of a scheme over all P:D."""
    series = next(name for name, drawn in SCHEMES.items() if drawn == scheme)
    mine = data[(data["hardware"] == hardware) & (data["series"] == series) & (data["length"] == length)]
    return float(mine["value"].max())


def lead_over_orca(data: pd.DataFrame, hardware: str, length: int = 1024) -> float:
    """Sarathi's highest gain over that of Orca's best case."""
    return best_gain(data, hardware, "sarathi", length) / best_gain(data, hardware, "orca_best", length)


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A row for each machine: the highest gain of each scheme as bars, and the gain against P:D for each length."""
    machines = list(dict.fromkeys(data["hardware"]))
    with page():
        figure, axes = new_figure(len(machines), 1 + len(PANELS), 0.5 + 2.0 * len(machines))
        for row, hardware in zip(axes, machines, strict=True):
            shown = data[data["hardware"] == hardware]
            claims = [claim for claim in printed if claim.hardware == hardware]
            _bars(row[0], shown, hardware, claims)
            for axis, panel in zip(row[1:], PANELS, strict=True):
                _lines(axis, shown[shown["length"] == panel.length], claims, panel)
                axis.sharey(row[1])
                axis.set_title(panel.title, loc="left")
            row[1].set_ylim(shown["value"].min() - 0.02, shown["value"].max() + 0.03)
            row[0].set_title(TITLES[hardware], loc="left")
            row[0].set_ylabel("highest throughput / baseline's")
            row[1].set_ylabel("throughput / baseline's")
        _legend(figure, axes[0])
    return figure


def _bars(axis: Axes, shown: pd.DataFrame, hardware: str, claims: Sequence[Claim]) -> None:
    width = 0.8 / len(SCHEMES)
    for index, (series, scheme) in enumerate(SCHEMES.items()):
        heights = [best_gain(shown, hardware, scheme, panel.length) for panel in PANELS]
        places = [place + (index - 1) * width for place in range(len(PANELS))]
        bars = axis.bar(places, heights, width, label=series, **fill_style((3, 1, 0)[index]))
        axis.bar_label(bars, fmt="%.2f", padding=4, fontsize=5.5, rotation=90)
        mine = [claim for claim in claims if claim.quantity in ("gain", "peak_gain") and _scheme(claim) == scheme]
        marks = {claim.setting["length"]: claim.printed for claim in mine if claim.printed}
        paper = [
            (place, marks[panel.length]) for place, panel in zip(places, PANELS, strict=True) if panel.length in marks
        ]
        if paper:
            axis.plot(*zip(*paper, strict=True), **(paper_style() | {"markersize": 3.5}))
    axis.set_ylim(0, 1.75)
    axis.set_xticks(range(len(PANELS)), [panel.title.replace(", ", "\n") for panel in PANELS])
    axis.grid(visible=True, axis="y")


def _scheme(claim: Claim) -> Scheme:
    scheme: Scheme = claim.setting.get("scheme", "sarathi")
    return scheme


def _lines(axis: Axes, shown: pd.DataFrame, claims: Sequence[Claim], panel: Panel) -> None:
    """The paper's values stand at the P:D that it gives."""
    for index, series in enumerate(SCHEMES):
        mine = shown[shown["series"] == series].sort_values("pd_ratio")
        axis.plot(mine["pd_ratio"], mine["value"], label=series, **line_style((4, 1, 0)[index]))
    marks = [
        (claim.setting["pd_ratio"], claim.printed)
        for claim in claims
        if claim.printed and claim.quantity == "gain" and claim.setting["length"] == panel.length
    ]
    if marks:
        axis.plot(*zip(*marks, strict=True), **paper_style())
    pd_axis(axis, (1, 5, 20, 100))


def _legend(figure: Figure, row: Sequence[Axes]) -> None:
    """A scheme's bar and line stand side by side."""
    bars, lines = (dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)) for axes in row[:2])
    handles: list[Any] = [(bars.pop(series), lines[series]) for series in SCHEMES]
    figure.legend(
        [*handles, *bars.values()],
        [*SCHEMES, *bars],
        loc="outside upper center",
        ncols=4,
        handlelength=4,
        handler_map={tuple: HandlerTuple(ndivide=None)},
    )
