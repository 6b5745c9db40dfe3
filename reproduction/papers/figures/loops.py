"""Ablation of the runtime on mixed traffic: both loops without graphs, with graphs of decodes, and with all graphs.

Measured by `python -m reproduction.bench loops`, with the settings of conf/experiment/loops.yaml. The posts on
asynchronous batching and on CUDA graphs each have one of the two, and pure decodes; with chunked prefills most
iterations hold prompts, which graphs of decodes do not serve.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from tabulate import tabulate

from experiments.plots.style import new_figure
from experiments.settings.backends import GRAPHS
from reproduction.papers.claims import Claim
from reproduction.papers.frames import load_benchmark, pivot, read_benchmark, select
from reproduction.papers.machines import Machines
from reproduction.parts import grouped_bars, legend

LOOPS = ("sync", "async")
PANELS = {
    "tokens_per_second": ("throughput [1,000 tokens/s]", 1e-3),
    "active_share": ("device active [% of the time]", 100.0),
    "eager_share": ("iterations without a graph [%]", 100.0),
}
"""Label and factor of each quantity."""


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, series (the loop), graphs, what (see `PANELS`), value."""
    data = load_benchmark("loops", ["series", "graphs", "what", "value"], _rows, say)
    if found := read_benchmark("loops"):
        data.attrs["traffic"] = _describe(found)
    return data


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    for loop in LOOPS:
        for graphs in GRAPHS:
            if run := found["figures"].get(f"{loop}, graphs {graphs}"):
                yield loop, graphs, "tokens_per_second", run["tokens_per_second"]["median"]
                yield loop, graphs, "active_share", run["active_share"]["median"]
                yield loop, graphs, "eager_share", run["eager_iterations"] / run["iterations"]


def _describe(found: Mapping[str, Any]) -> str:
    """What was served, and where."""
    shortest, longest = found["lengths"]
    return (
        f"{found['model']} on {found['hardware']}: {found['requests']} requests of {shortest} to {longest} tokens, "
        f"P:D {found['ratio']:g}, C = {found['chunk']}, B = {found['batch']}"
    )


def gain(data: pd.DataFrame, loop: str, graphs: str, over_loop: str = "sync", over_graphs: str = "off") -> float:
    """Throughput of one combination over another's."""
    table = select(data, what="tokens_per_second").set_index(["series", "graphs"])["value"]
    return float(table[loop, graphs] / table[over_loop, over_graphs])


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A panel for each quantity, a pair of bars for each kind of graphs. The posts have no such traffic."""
    figure, [panels] = new_figure(1, len(PANELS), 2.6)
    for panel, (what, (label, factor)) in zip(panels, PANELS.items(), strict=True):
        grouped_bars(
            panel, factor * pivot(select(data, what=what), "graphs"), (3, 0), width=0.37, fmt="%.3g", fontsize=6
        )
        panel.margins(y=0.1)
        panel.set(ylabel=label, xlabel="graphs of iterations")
    legend(figure, panels[:1], ncols=2, title=data.attrs.get("traffic", ""), title_fontsize=8)
    return figure


def text(data: pd.DataFrame) -> str:
    """Every combination in a row."""
    table = pivot(data, ["graphs", "series"], "what")
    rows = [
        (*key, row["tokens_per_second"], f"{row['active_share']:.1%}", f"{row['eager_share']:.1%}")
        for key, row in zip(table.index, table.to_dict("records"), strict=True)
    ]
    return tabulate(rows, ("graphs", "loop", "tokens/s", "device active", "without a graph"), floatfmt=",.0f")
