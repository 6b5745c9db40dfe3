"""Table 2 of SARATHI (arXiv 2308.16369): one iteration of a prompt, of decodes, and of both, and what a token of each costs.

A decode beside a prompt costs what the iteration takes beyond the prompt alone, for each decode. Totals are of matrix
products and attention, as the paper's are: its rows add up without anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tabulate import tabulate

from cbatch import BatchShape
from cbatch.sim.cost import ProfileCost
from experiments.paper.claims import Claim
from experiments.paper.machines import TITLES, Machines
from experiments.plots.style import new_figure
from experiments.plots.style import printed as page

CONTEXT = 1024
SHAPES = {
    "prefill-only": BatchShape(((1024, 0),)),
    "decode-only": BatchShape((), 4, 4 * CONTEXT),
    "decode-maximal": BatchShape(((1021, 0),), 3, 3 * CONTEXT),
}
LEFT = -1.9  # of the names, in widths of a column
COLUMNS = ("linear", "attention", "total", "prefill/token", "decode/token")


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, series (the iteration), column, value (milliseconds). Combinations that mean nothing have no row."""
    rows = [(hardware, *row) for hardware, at in machines.single_iterations() for row in _rows(at.cost)]
    return pd.DataFrame(rows, columns=["hardware", "series", "column", "value"])


def _rows(cost: ProfileCost) -> Iterator[tuple[str, str, float]]:
    prompt = cost.parts(SHAPES["prefill-only"])
    prompt_only = prompt.linear + prompt.attention
    for series, shape in SHAPES.items():
        parts = cost.parts(shape)
        total = parts.linear + parts.attention
        values = {"linear": parts.linear, "attention": parts.attention, "total": total}
        if shape.chunks:
            values["prefill/token"] = prompt_only / SHAPES["prefill-only"].num_tokens
        if shape.num_decodes:
            values["decode/token"] = (total - prompt_only if shape.chunks else total) / shape.num_decodes
        yield from ((series, column, 1e3 * value) for column, value in values.items())


def milliseconds(data: pd.DataFrame, hardware: str, series: str, column: str) -> float:
    """One value of the table."""
    return float(data.set_index(["hardware", "series", "column"])["value"][hardware, series, column])


def saving(data: pd.DataFrame, hardware: str) -> float:
    """A decode alone over a decode beside a prompt."""
    alone, beside = (
        milliseconds(data, hardware, series, "decode/token") for series in ("decode-only", "decode-maximal")
    )
    return alone / beside


def text(data: pd.DataFrame) -> str:
    """The table in Markdown, a row for each iteration, in milliseconds."""
    table = data.pivot_table(index=["hardware", "series"], columns="column", values="value", sort=False)[list(COLUMNS)]
    rows = [
        (*names, *("-" if value != value else f"{value:#.4g}" for value in values))
        for names, values in zip(table.index, table.to_numpy(), strict=True)
    ]
    return tabulate(rows, ("hardware", "iteration [ms]", *COLUMNS), tablefmt="github", disable_numparse=True)


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """The table for each machine: ours, and below each value the paper's."""
    machines = list(dict.fromkeys(data["hardware"]))
    with page():
        figure, axes = new_figure(len(machines), 1, 0.15 + 1.5 * len(machines))
        for [panel], hardware in zip(axes, machines, strict=True):
            ours = data[data["hardware"] == hardware].set_index(["series", "column"])["value"]
            paper = {
                (claim.setting["series"], claim.setting["column"]): claim.printed
                for claim in printed
                if claim.hardware == hardware and claim.quantity == milliseconds.__name__
            }
            _table(panel, hardware, ours, paper)
    return figure


def _table(panel: Axes, hardware: str, ours: pd.Series[float], paper: Mapping[tuple[str, str], float | None]) -> None:
    """Rows of text at whole heights, the head above them."""
    panel.set_axis_off()
    panel.set_xlim(LEFT - 0.05, len(COLUMNS) - 0.4)
    panel.set_ylim(len(SHAPES) - 0.4, -1.1)
    panel.text(LEFT, -0.7, f"{TITLES[hardware]} [ms]", va="center")
    for place, column in enumerate(COLUMNS):
        panel.text(place + 0.4, -0.7, column, ha="right", va="center")
    for height in (-1.05, -0.4, len(SHAPES) - 0.45):
        panel.axhline(height, color="black", linewidth=0.7)
    for row, series in enumerate(SHAPES):
        panel.text(LEFT, row - 0.08, series, va="center")
        panel.text(LEFT, row + 0.22, _tokens(SHAPES[series]), va="center", fontsize=6, color="#555555")
        for place, column in enumerate(COLUMNS):
            value, known = ours.get((series, column)), paper.get((series, column))
            panel.text(place + 0.4, row - 0.08, "-" if value is None else f"{value:#.4g}", ha="right", va="center")
            if known is not None:
                panel.text(
                    place + 0.4, row + 0.22, f"paper {known:g}", ha="right", va="center", fontsize=6, color="#555555"
                )


def _tokens(shape: BatchShape) -> str:
    prompt = sum(tokens for tokens, _ in shape.chunks)
    decodes = f"{shape.num_decodes} decodes at {CONTEXT:,}" if shape.num_decodes else ""
    return " + ".join(filter(None, [f"{prompt:,} prompt tokens" if prompt else "", decodes]))
