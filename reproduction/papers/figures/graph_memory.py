"""What CUDA graphs cost in memory: 1, 2 and all of a model in one pool and in pools of their own. Measured by `python -m reproduction.bench graphs`."""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots.style import new_figure
from reproduction.papers.claims import Claim
from reproduction.papers.frames import add_provenance, pivot, read_stored, select
from reproduction.papers.machines import Machines
from reproduction.parts import grouped_bars

POOLS = ("one pool", "pools of their own")
BUFFERS = ("inputs", "outputs")


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, way, series (how graphs share memory, or inputs and outputs), graphs (or slots), value: bytes."""
    if not (file := read_stored("graphs-ways", say)):
        return pd.DataFrame()
    ways = {name: way["memory"] for name, way in file["figures"].items() if "memory" in way}
    rows = [(file["hardware"], name, *row) for name, memory in ways.items() for row in _rows(memory)]
    return add_provenance(pd.DataFrame(rows, columns=["hardware", "way", "series", "graphs", "value"]), file)


def _rows(memory: dict[str, Any]) -> list[tuple[str, int, int]]:
    graphs = [(pool, int(number), found["pool"]) for pool in POOLS for number, found in memory[pool].items()]
    slots = [(name, number, sum(memory[name][:number])) for name in BUFFERS for number in (1, 2)]
    return [*graphs, *slots]


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Left, memory of graphs; right, buffers of one slot and of both."""
    shown = select(data, way=data["way"].iloc[0])
    figure, [[pools, buffers]] = new_figure(1, 2, 2.6)
    for panel, names, unit in ((pools, POOLS, 2**20), (buffers, BUFFERS, 1)):
        grouped_bars(panel, pivot(shown[shown["series"].isin(names)], "graphs") / unit, fmt="{:,.0f}", fontsize=6)
    pools.set(
        title=f"{shown['way'].iloc[0]}, {shown['hardware'].iloc[0]}",
        xlabel="graphs, the largest first",
        ylabel="memory [MiB]",
    )
    buffers.set(title="buffers that are not shared", xlabel="slots", ylabel="memory [bytes]")
    for panel in (pools, buffers):
        panel.yaxis.set_major_formatter("{x:,.0f}")
        panel.legend(loc="upper left")
    return figure
