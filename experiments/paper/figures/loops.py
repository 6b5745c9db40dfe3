"""Ablation of the runtime: both loops with no graphs, graphs of decodes alone, and graphs of all iterations, on mixed traffic.

Measured by `python -m experiments.bench loops`, with the settings of conf/experiment/loops.yaml. The posts on asynchronous batching and on CUDA graphs each have one of the
two and pure decodes; with chunked prefills most iterations hold prompts, which graphs of decodes do not serve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tabulate import tabulate

from experiments.config.backends import GRAPHS
from experiments.paper.claims import Claim
from experiments.paper.machines import Machines
from experiments.paper.measured import left_out, measured, stamped
from experiments.plots.style import fill_style, new_figure
from experiments.plots.style import printed as page

LOOPS = ("sync", "async")
WHAT = {
    "tokens_per_second": "throughput [1,000 tokens/s]",
    "active_share": "device active [% of the time]",
    "eager_share": "iterations without a graph [%]",
}
SCALES = {"tokens_per_second": 1e-3, "active_share": 100.0, "eager_share": 100.0}


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, series (the loop), graphs, what (see `WHAT`), value."""
    found = measured("loops")
    columns = ["hardware", "series", "graphs", "what", "value"]
    if found is None:
        say(left_out("loops"))
        return pd.DataFrame(columns=columns)
    rows = []
    for loop in LOOPS:
        for graphs in GRAPHS:
            if (run := found["figures"].get(f"{loop}, graphs {graphs}")) is None:
                continue
            values = {
                "tokens_per_second": run["tokens_per_second"]["median"],
                "active_share": run["active_share"]["median"],
                "eager_share": run["eager_iterations"] / run["iterations"],
            }
            rows += [(found["hardware"], loop, graphs, what, value) for what, value in values.items()]
    data = stamped(pd.DataFrame(rows, columns=columns), found)
    data.attrs["traffic"] = _traffic(found)
    return data


def gain(data: pd.DataFrame, loop: str, graphs: str, over_loop: str = "sync", over_graphs: str = "off") -> float:
    """Throughput of one combination over another's."""
    table = data[data["what"] == "tokens_per_second"].set_index(["series", "graphs"])["value"]
    return float(table[loop, graphs] / table[over_loop, over_graphs])


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A panel for each quantity, a pair of bars for each kind of graphs. The posts have no such traffic."""
    with page():
        figure, [panels] = new_figure(1, len(WHAT), 2.6)
        for panel, (what, label) in zip(panels, WHAT.items(), strict=True):
            shown = (
                data[data["what"] == what].pivot_table(index="graphs", columns="series", values="value") * SCALES[what]
            )
            _bars(panel, shown.reindex([graphs for graphs in GRAPHS if graphs in shown.index]))
            panel.set_ylabel(label)
            panel.set_xlabel("graphs of iterations")
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside upper center",
            ncols=2,
            title=data.attrs["traffic"],
            title_fontsize=8,
        )
    return figure


def _traffic(found: Mapping[str, Any]) -> str:
    """What was served, and where."""
    shortest, longest = found["lengths"]
    return (
        f"{found['model']} on {found['hardware']}: {found['requests']} requests of {shortest} to {longest} tokens, "
        f"P:D {found['ratio']:g}, C = {found['chunk']}, B = {found['batch']}"
    )


def _bars(panel: Axes, table: pd.DataFrame) -> None:
    """table: [graphs, loop]."""
    for index, loop in enumerate(loop for loop in LOOPS if loop in table):
        bars = panel.bar(
            [place + 0.38 * (index - 0.5) for place in range(len(table))],
            table[loop],
            0.36,
            label=loop,
            **fill_style((3, 0)[index]),
        )
        panel.bar_label(bars, fmt="%.3g", fontsize=6)
    panel.margins(y=0.1)
    panel.set_xticks(range(len(table)), table.index)
    panel.grid(visible=True, axis="y")


def text(data: pd.DataFrame) -> str:
    table = data.pivot_table(index=["graphs", "series"], columns="what", values="value", sort=False)
    rows = [
        (*key, row["tokens_per_second"], f"{row['active_share']:.1%}", f"{row['eager_share']:.1%}")
        for key, row in zip(table.index, table.to_dict("records"), strict=True)
    ]
    return tabulate(rows, ("graphs", "loop", "tokens/s", "device active", "without a graph"), floatfmt=",.0f")
