"""Table 4 of SARATHI (arXiv 2308.16369): decode speedup and throughput gain end to end at C = 256, by length and batch.

LLaMA-13B on the A6000, LLaMA-33B on the A100, and the first one's rows on the other available machines.
"""

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.figure import Figure
from tabulate import tabulate

from experiments.paper.claims import Claim
from experiments.paper.frames import pivot
from experiments.paper.machines import TITLES, Machines
from experiments.paper.quantities import decode_speedup
from experiments.paper.steady import Load
from experiments.plots.parts import table_axes, write_row
from experiments.plots.style import new_figure

CHUNK = 256
OF_13B = (Load(1024, 6, 50), Load(2048, 6, 50), Load(3072, 6, 50))
LOADS = {
    "a6000": OF_13B,
    "a100": (Load(1024, 10, 28), Load(2048, 5, 63), Load(3072, 3, 127)),
    "h200-13b": OF_13B,
    "gpu": OF_13B,
}
KEYS = ["hardware", "length", "batch", "pd_ratio"]
HEAD = ("hardware, model", "L", "B", "P:D")
COLUMNS = {"decode_speedup": "decode speedup", "gain": "throughput gain"}
PLACES = (0.01, 0.32, 0.39, 0.48, 0.66, 0.88)


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, series (decode_speedup, gain), length, batch, pd_ratio, value."""
    rows = []
    for hardware, at in machines.available(LOADS):
        say(hardware)
        for load in LOADS[hardware]:
            values = (decode_speedup(at, load.length, load.batch, CHUNK), at.gain("sarathi", load, CHUNK))
            rows += [
                (hardware, series, load.length, load.batch, load.pd_ratio, value)
                for series, value in zip(COLUMNS, values, strict=True)
            ]
    return pd.DataFrame(rows, columns=["hardware", "series", "length", "batch", "pd_ratio", "value"])


def _rows(data: pd.DataFrame, printed: Sequence[Claim] = ()) -> list[tuple[str, ...]]:
    """The table's rows, with the paper's values in parentheses if `printed` has them."""
    table = pivot(data, KEYS)
    paper = {(claim.hardware, claim.setting["length"], claim.quantity): claim.printed for claim in printed}
    rows = []
    for (hardware, length, batch, ratio), row in zip(table.index, table.to_dict("records"), strict=True):
        values = [
            f"{row[series]:.2f}"
            + ("" if (known := paper.get((hardware, length, series))) is None else f"  ({known:.2f})")
            for series in COLUMNS
        ]
        rows.append((TITLES[hardware], f"{length // 1024}K", str(batch), f"{ratio:g}:1", *values))
    return rows


def text(data: pd.DataFrame) -> str:
    """The table in Markdown."""
    return tabulate(_rows(data), (*HEAD, *COLUMNS.values()), tablefmt="github", disable_numparse=True)


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """The table, with the paper's values beside ours."""
    rows = _rows(data, printed)
    figure, [[axes]] = new_figure(1, 1, 0.5 + 0.22 * len(rows))
    table_axes(axes, (0, 1), len(rows), (-1.55, -0.5, len(rows) - 0.45))
    write_row(axes, PLACES, -1.0, (*HEAD, *(f"{name} (paper)" for name in COLUMNS.values())))
    last = rows[0][0]
    for y, (machine, *cells) in enumerate(rows):
        if machine != last:
            axes.axhline(y - 0.5, color="black", linewidth=0.3)
        write_row(axes, PLACES, y, ("" if y and machine == last else machine, *cells))
        last = machine
    return figure
