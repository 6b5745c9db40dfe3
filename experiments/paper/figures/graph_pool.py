"""Memory of captured CUDA graphs: one shared pool against a pool a graph, by the number of graphs captured.

Fireworks AI's post (August 2023) captures a graph for each batch size, in decreasing order, into one shared pool. Measured
by `python -m experiments.bench graph_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper.claims import Claim
from experiments.paper.machines import Machines
from experiments.paper.measured import left_out, measured, stamped
from experiments.plots.style import line_style, new_figure
from experiments.plots.style import printed as page

SHARED, SMALLEST_FIRST, OWN = "one pool, largest first", "one pool, smallest first", "a pool for each graph"


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, series (the way), graphs (captured so far), tokens (of the last one), value (bytes in all)."""
    found = measured("graph_memory")
    columns = ["hardware", "series", "graphs", "tokens", "value"]
    if found is None:
        say(left_out("graph_memory"))
        return pd.DataFrame(columns=columns)
    rows = [
        (found["hardware"], name, index + 1, tokens, taken)
        for name, way in found["figures"].items()
        for index, (tokens, taken) in enumerate(zip(way["tokens"], way["bytes"], strict=True))
    ]
    return stamped(pd.DataFrame(rows, columns=columns), found)


def total(data: pd.DataFrame, series: str) -> float:
    """Bytes of all graphs."""
    return float(data[data["series"] == series]["value"].iloc[-1])


def over_largest(data: pd.DataFrame, series: str = SHARED) -> float:
    """All graphs' memory over that of the largest alone."""
    return total(data, series) / float(data[data["series"] == SHARED]["value"].iloc[0])


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A line for each way; above the panel, the tokens of each graph, largest first. The post prints no amounts."""
    with page():
        figure, [[panel]] = new_figure(1, 1, 2.9)
        for index, series in enumerate(dict.fromkeys(data["series"])):
            line = data[data["series"] == series]
            panel.plot(
                line["graphs"],
                line["value"] / 1e6,
                label=f"{series}: {total(data, series) / 1e6:,.0f} MB",
                **line_style(index),
            )
        shared = data[data["series"] == SHARED]
        changes = shared[shared["tokens"] != shared["tokens"].shift()]
        above = panel.secondary_xaxis("top")
        above.set_xticks(changes["graphs"], changes["tokens"].astype(str), fontsize=6)
        above.set_xlabel("tokens of the graph from there on, where the largest is captured first", fontsize=7)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("graphs captured")
        panel.set_ylabel("device memory of the graphs [MB]")
        panel.legend(loc="center right", title=f"{data['hardware'].iloc[0]}, each shape once for each of two I/O slots")
        panel.grid(visible=True)
    return figure
