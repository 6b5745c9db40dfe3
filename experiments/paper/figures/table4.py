"""Table 4 of SARATHI (arXiv 2308.16369): decode speedup and throughput gain end to end at C = 256, by length and batch.

Of LLaMA-13B on the A6000, of LLaMA-33B on the A100, and the former's rows on other machines at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tabulate import tabulate

from experiments.paper.claims import Claim
from experiments.paper.machines import TITLES, Machines
from experiments.paper.quantities import decode_speedup
from experiments.paper.steady import Load
from experiments.plots.style import new_figure
from experiments.plots.style import printed as page

CHUNK = 256
OF_13B = (Load(1024, 6, 50), Load(2048, 6, 50), Load(3072, 6, 50))
LOADS = {
    "a6000": OF_13B,
    "a100": (Load(1024, 10, 28), Load(2048, 5, 63), Load(3072, 3, 127)),
    "h200-13b": OF_13B,
    "gpu": OF_13B,
}
COLUMNS = {"decode_speedup": "decode speedup", "gain": "throughput gain"}


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, series (decode_speedup, gain), length, batch, pd_ratio, value."""
    rows = []
    for hardware, loads in LOADS.items():
        if at := machines.get(hardware):
            say(hardware)
            for load in loads:
                values = (decode_speedup(at, load.length, load.batch, CHUNK), at.gain("sarathi", load, CHUNK))
                rows += [
                    (hardware, series, load.length, load.batch, load.pd_ratio, value)
                    for series, value in zip(COLUMNS, values, strict=True)
                ]
    return pd.DataFrame(rows, columns=["hardware", "series", "length", "batch", "pd_ratio", "value"])


def text(data: pd.DataFrame) -> str:
    """The table in Markdown."""
    table = data.pivot_table(
        index=["hardware", "length", "batch", "pd_ratio"], columns="series", values="value", sort=False
    )
    rows = [
        (
            TITLES[str(hardware)],
            f"{length // 1024}K",
            batch,
            f"{ratio:g}:1",
            *(f"{row[series]:.2f}" for series in COLUMNS),
        )
        for (hardware, length, batch, ratio), row in zip(table.index, table.to_dict("records"), strict=True)
    ]
    return tabulate(
        rows, ("hardware, model", "L", "B", "P:D", *COLUMNS.values()), tablefmt="github", disable_numparse=True
    )


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """The table: ours, and beside each value the paper's."""
    table = data.pivot_table(
        index=["hardware", "length", "batch", "pd_ratio"], columns="series", values="value", sort=False
    )
    paper = {(claim.hardware, claim.setting["length"], claim.quantity): claim.printed for claim in printed}
    with page():
        figure, [[axes]] = new_figure(1, 1, 0.5 + 0.22 * len(table))
        axes.set_axis_off()
        axes.set_xlim(0, 1)
        axes.set_ylim(len(table) - 0.4, -1.6)
        heads = ("hardware, model", "L", "B", "P:D", *(f"{name} (paper)" for name in COLUMNS.values()))
        _row(axes, -1.0, heads)
        last = None
        for place, ((hardware, length, batch, ratio), row) in enumerate(
            zip(table.index, table.to_dict("records"), strict=True)
        ):
            if hardware != last:
                axes.axhline(place - 0.5, color="black", linewidth=0.7 if last is None else 0.3)
            values = [_value(row, series, paper, (hardware, length, series)) for series in COLUMNS]
            _row(
                axes,
                place,
                (TITLES[hardware] if hardware != last else "", f"{length // 1024}K", batch, f"{ratio:g}:1", *values),
            )
            last = hardware
        for height in (-1.55, len(table) - 0.45):
            axes.axhline(height, color="black", linewidth=0.9)
    return figure


def _value(
    row: Mapping[object, float],
    series: str,
    paper: Mapping[tuple[str, int, str], float | None],
    key: tuple[str, int, str],
) -> str:
    return f"{row[series]:.2f}" + (f"  ({paper[key]:.2f})" if paper.get(key) is not None else "")


def _row(axes: Axes, height: float, cells: Sequence[object]) -> None:
    """Names to the left, numbers about their column's middle."""
    for place, cell in zip((0.01, 0.32, 0.39, 0.48, 0.66, 0.88), cells, strict=True):
        axes.text(place, height, str(cell), va="center", ha="left" if place < 0.1 else "center")
