"""Table 2 of SARATHI (arXiv 2308.16369): an iteration of a prompt, of decodes, and of both, with times per token.

A decode beside a prompt costs its share of what the iteration takes beyond the prompt alone. Totals are matrix products
plus attention, as in the paper, whose rows add up without anything else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tabulate import tabulate

from cbatch import BatchShape
from cbatch.sim import ProfileCost
from experiments.paper.claims import Claim
from experiments.paper.frames import pivot
from experiments.paper.machines import SINGLE_ITERATIONS, TITLES, Machines
from experiments.plots.parts import facet, table_axes, write_row

CONTEXT = 1024
SHAPES = {
    "prefill-only": BatchShape(((1024, 0),)),
    "decode-only": BatchShape((), 4, 4 * CONTEXT),
    "decode-maximal": BatchShape(((1021, 0),), 3, 3 * CONTEXT),
}
LEFT = -1.9  # x of the names, in widths of a column
COLUMNS = ("linear", "attention", "total", "prefill/token", "decode/token")


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, series (the iteration), column, value (milliseconds). Meaningless combinations have no row."""
    available = machines.available(SINGLE_ITERATIONS)
    rows = [(hardware, *row) for hardware, at in available for row in _rows(at.cost)]
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
    """Time of a decode alone over that of a decode beside a prompt."""
    alone, beside = (milliseconds(data, hardware, name, "decode/token") for name in ("decode-only", "decode-maximal"))
    return alone / beside


def text(data: pd.DataFrame) -> str:
    """The table in Markdown, a row for each iteration, in milliseconds."""
    table = pivot(data, ["hardware", "series"], "column")[list(COLUMNS)]
    rows = [
        (*names, *("-" if value != value else f"{value:#.4g}" for value in values))
        for names, values in zip(table.index, table.to_numpy(), strict=True)
    ]
    return tabulate(rows, ("hardware", "iteration [ms]", *COLUMNS), tablefmt="github", disable_numparse=True)


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """The table for each machine: our values, and the paper's below them."""
    figure, facets = facet(data, 1, 1.5, extra=0.15)
    for hardware, shown, [panel] in facets:
        ours = shown.set_index(["series", "column"])["value"].to_dict()
        paper = {
            (claim.setting["series"], claim.setting["column"]): claim.printed
            for claim in printed
            if claim.hardware == hardware and claim.quantity == milliseconds.__name__
        }
        _draw_table(panel, TITLES[hardware], ours, paper)
    return figure


def _draw_table(panel: Axes, title: str, ours: Mapping[Any, float], paper: Mapping[Any, float | None]) -> None:
    places, small = [LEFT, *(0.1 + column for column in range(len(COLUMNS)))], {"fontsize": 6, "color": "#555555"}
    table_axes(panel, (LEFT - 0.05, len(COLUMNS) - 0.4), len(SHAPES), (-1.05, -0.4, len(SHAPES) - 0.45))
    write_row(panel, places, -0.7, (f"{title} [ms]", *COLUMNS))
    for row, (series, shape) in enumerate(SHAPES.items()):
        values, known = ([table.get((series, column)) for column in COLUMNS] for table in (ours, paper))
        write_row(panel, places, row - 0.08, (series, *("-" if value is None else f"{value:#.4g}" for value in values)))
        notes = ("" if value is None else f"paper {value:g}" for value in known)
        write_row(panel, places, row + 0.22, (_describe(shape), *notes), **small)


def _describe(shape: BatchShape) -> str:
    prompt = sum(tokens for tokens, _ in shape.chunks)
    decodes = f"{shape.num_decodes} decodes at {CONTEXT:,}" if shape.num_decodes else ""
    return " + ".join(filter(None, [f"{prompt:,} prompt tokens" if prompt else "", decodes]))
