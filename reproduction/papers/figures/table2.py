"""Table 2 of SARATHI (arXiv 2308.16369): an iteration of a prompt, of decodes, and of both, with times per token.

A decode beside a prompt costs its share of what the iteration takes beyond the prompt alone. Totals are matrix products
plus attention, as in the paper, whose rows add up without anything else.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd
from tabulate import tabulate

from cbatch import BatchShape
from cbatch.sim import ProfileCost
from reproduction.papers.claims import Claim
from reproduction.papers.frames import Row, data_frame, pivot
from reproduction.papers.machines import SINGLE_ITERATIONS, TITLES, Machines
from reproduction.papers.quantities import value

CONTEXT = 1024
SHAPES = {
    "prefill-only": BatchShape(((1024, 0),)),
    "decode-only": BatchShape((), 4, 4 * CONTEXT),
    "decode-maximal": BatchShape(((1021, 0),), 3, 3 * CONTEXT),
}
COLUMNS = ("linear", "attention", "total", "prefill/token", "decode/token")


@data_frame("hardware", "series", "column", "value")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """Milliseconds; series: the iteration. Meaningless combinations have no row."""
    return ((hardware, *row) for hardware, at in machines.available(SINGLE_ITERATIONS) for row in _rows(at.cost))


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
        yield from ((series, column, 1e3 * seconds) for column, seconds in values.items())


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> str:
    """The table in Markdown, a row for each iteration, in milliseconds; the paper's values in parentheses."""
    paper = {
        (claim.hardware, claim.setting["series"], claim.setting["column"]): claim.printed
        for claim in printed
        if claim.quantity == value.__name__
    }
    rows = []
    table = pivot(data, ["hardware", "series"], "column")[list(COLUMNS)]
    for (hardware, series), values in zip(table.index, table.to_numpy(), strict=True):
        known = (paper.get((hardware, series, column)) for column in COLUMNS)
        cells = (
            ("-" if np.isnan(ours) else f"{ours:#.4g}") + ("" if theirs is None else f" ({theirs:g})")
            for ours, theirs in zip(values, known, strict=True)
        )
        rows.append((TITLES[hardware], f"{series}: {_describe(SHAPES[series])}", *cells))
    return tabulate(rows, ("machine", "iteration [ms]", *COLUMNS), tablefmt="github", disable_numparse=True)


def _describe(shape: BatchShape) -> str:
    prompt = sum(tokens for tokens, _ in shape.chunks)
    decodes = f"{shape.num_decodes} decodes at {CONTEXT:,}" if shape.num_decodes else ""
    return " + ".join(filter(None, [f"{prompt:,} prompt tokens" if prompt else "", decodes]))
