"""Memory of captured CUDA graphs: one shared pool against one pool per graph, by the number of graphs captured.

Fireworks AI's post (August 2023) captures a graph for each batch size, in decreasing order, into one shared pool.
Measured by `python -m reproduction.bench graph_memory`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots.style import line_style, new_figure
from reproduction.papers.claims import Claim
from reproduction.papers.frames import load_benchmark, select
from reproduction.papers.machines import Machines

SHARED, SMALLEST_FIRST, OWN = "one pool, largest first", "one pool, smallest first", "a pool for each graph"


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, series (the way), graphs (captured so far), tokens (of the last one), value (bytes of all)."""
    return load_benchmark("graph_memory", ["series", "graphs", "tokens", "value"], _rows, say)


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    for name, way in found["figures"].items():
        for index, (tokens, size) in enumerate(zip(way["tokens"], way["bytes"], strict=True)):
            yield name, index + 1, tokens, size


def total(data: pd.DataFrame, series: str) -> float:
    """Bytes of all graphs."""
    return float(select(data, series=series)["value"].iloc[-1])


def over_largest(data: pd.DataFrame, series: str = SHARED) -> float:
    """All graphs' memory over that of the largest alone."""
    return total(data, series) / float(select(data, series=SHARED)["value"].iloc[0])


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A line for each way; above the panel, the tokens of each graph, largest first. The post prints no amounts."""
    figure, [[panel]] = new_figure(1, 1, 2.9)
    for index, series in enumerate(dict.fromkeys(data["series"])):
        line, label = select(data, series=series), f"{series}: {total(data, series) / 1e6:,.0f} MB"
        panel.plot(line["graphs"], line["value"] / 1e6, label=label, **line_style(index))
    shared = select(data, series=SHARED)
    changes = shared[shared["tokens"] != shared["tokens"].shift()]
    above = panel.secondary_xaxis("top")
    above.set_xticks(changes["graphs"], changes["tokens"].astype(str), fontsize=6)
    above.set_xlabel("tokens of the graph from there on, where the largest is captured first", fontsize=7)
    panel.set_ylim(bottom=0)
    panel.set(xlabel="graphs captured", ylabel="device memory of the graphs [MB]")
    panel.legend(loc="center right", title=f"{data['hardware'].iloc[0]}, each shape once for each of two I/O slots")
    return figure
