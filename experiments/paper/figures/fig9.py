"""Fig 9 of SARATHI (arXiv 2308.16369): throughput over the baseline's against P:D, for chunks of 128, 256 and 512 tokens.

The gain is highest where the chunks of a prompt and the decodes of an output take the same number of iterations. With the
chunk C' = C - (B-1) that fills the tiles together with B-1 decodes, that is at P:D = C/(B-1) - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.paper.claims import Claim
from experiments.paper.machines import TITLES, Machines
from experiments.paper.panels import PANELS, Panel, pd_axis, predicted_peak, ratios
from experiments.paper.steady import Load
from experiments.plots.style import line_style, new_figure, paper_style
from experiments.plots.style import printed as page

CHUNKS = (128, 256, 512)
HARDWARE = ("a6000", "h200-13b", "gpu")
PEAK = "peak predicted, C/(B-1) - 1"


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Throughput over the baseline's.

    Columns: hardware, series (C, tokens), length, batch, pd_ratio, value.
    """
    rows = []
    for hardware in HARDWARE:
        if (at := machines.get(hardware)) is None:
            continue
        for panel in PANELS:
            say(f"{hardware}, {panel.title}")
            for chunk in CHUNKS if not machines.are_real or panel == PANELS[0] else (256,):
                for ratio in ratios(panel, chunk, real=machines.are_real):
                    gain = at.gain("sarathi", Load(panel.length, panel.batch, ratio), chunk)
                    rows.append((hardware, chunk, panel.length, panel.batch, ratio, gain))
    return pd.DataFrame(rows, columns=["hardware", "series", "length", "batch", "pd_ratio", "value"])


def best_gain(data: pd.DataFrame, hardware: str, chunk: int, length: int = 1024) -> float:
    """The highest gain of a line."""
    return float(_line(data, hardware, chunk, length).max())


def best_ratio(data: pd.DataFrame, hardware: str, chunk: int, length: int = 1024) -> float:
    """P:D where a line is highest, among those that were measured."""
    line = _line(data, hardware, chunk, length)
    return float(line.index[int(line.argmax())])


def lead_of_256(data: pd.DataFrame, hardware: str, chunk: int, length: int = 1024) -> float:
    """The highest gain of chunks of 256 over that of another size."""
    return best_gain(data, hardware, 256, length) / best_gain(data, hardware, chunk, length)


def _line(data: pd.DataFrame, hardware: str, chunk: int, length: int) -> pd.Series[float]:
    mine = data[(data["hardware"] == hardware) & (data["series"] == chunk) & (data["length"] == length)]
    return mine.set_index("pd_ratio")["value"]


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A row for each machine, a panel for each length; short lines above where the peaks are predicted."""
    machines = list(dict.fromkeys(data["hardware"]))
    with page():
        figure, axes = new_figure(len(machines), len(PANELS), 0.5 + 2.1 * len(machines))
        for row, hardware in zip(axes, machines, strict=True):
            claims = [claim for claim in printed if claim.hardware == hardware]
            for axis, panel in zip(row, PANELS, strict=True):
                shown = data[(data["hardware"] == hardware) & (data["length"] == panel.length)]
                _lines(axis, shown, panel)
                _mark(axis, claims, panel)
                pd_axis(axis)
                axis.sharey(row[0])
                axis.set_title(f"{TITLES[hardware]}: {panel.title}", loc="left")
            row[0].set_ylabel("throughput over the baseline's")
        legend = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
        legend[PEAK] = legend.pop(PEAK)  # last
        figure.legend(list(legend.values()), list(legend), loc="outside upper center", ncols=5)
    return figure


def _lines(axis: Axes, shown: pd.DataFrame, panel: Panel) -> None:
    axis.axhline(1, color="black", linewidth=0.6)
    top = axis.get_xaxis_transform()
    for index, chunk in enumerate(CHUNKS):
        mine = shown[shown["series"] == chunk].sort_values("pd_ratio")
        if len(mine):
            style = line_style(index)
            axis.plot(mine["pd_ratio"], mine["value"], label=f"C = {chunk}", **style)
            axis.vlines(
                predicted_peak(chunk, panel.batch),
                0,
                1,
                transform=top,
                colors=style["color"],
                linewidth=0.7,
                linestyles=style["linestyle"],
                label="_" if index else PEAK,
                zorder=1,
            )


def _mark(axis: Axes, claims: Sequence[Claim], panel: Panel) -> None:
    """The gains that the paper prints."""
    marks = [
        (claim.setting["pd_ratio"], claim.printed)
        for claim in claims
        if claim.quantity == "gain" and claim.printed is not None and claim.setting.get("length") == panel.length
    ]
    if marks:
        axis.plot(*zip(*marks, strict=True), **paper_style())
