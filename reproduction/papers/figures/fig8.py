"""Fig 8 of SARATHI (arXiv 2308.16369): speedup of a decode beside a chunk of 256 over one alone, by batch size.

A decode beside a chunk costs its share of what the mixed iteration takes beyond the chunk alone (Table 2). The speedup
falls with the batch, as larger batches already share the weights among their decodes, and with the length, as attention
is not shared.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from reproduction.papers.claims import Claim
from reproduction.papers.frames import Row, data_frame, pivot, select
from reproduction.papers.machines import TITLES, Machines
from reproduction.papers.panels import PANELS
from reproduction.papers.quantities import decode_speedup, value
from reproduction.parts import facet, grouped_bars, legend, mark_printed

CHUNK = 256
HARDWARE = ("a6000", "a100", "h200-13b")
FITTING_33B = {1024: 10, 2048: 5, 3072: 3}
"""The largest batch of LLaMA-33B by length (Table 4)."""


@data_frame("hardware", "series", "batch", "value")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """Speedup of a decode, in batches up to the largest that fits; series: L."""
    fitting = dict(PANELS)
    for hardware, at in machines.available(HARDWARE):
        for length, most in (FITTING_33B if hardware == "a100" else fitting).items():
            for batch in sorted({*range(2, most, 2), most}):
                yield hardware, length, batch, decode_speedup(at, length, batch, CHUNK)


def share_falling(data: pd.DataFrame, hardware: str) -> float:
    """Share of the steps to the next larger batch, or to the next longer requests, at which the speedup falls."""
    table = select(data, hardware=hardware).pivot_table(index="batch", columns="series", values="value")
    steps = np.concatenate([np.diff(table.to_numpy(), axis=axis).ravel() for axis in (0, 1)])
    return float(np.mean(steps[~np.isnan(steps)] < 0))


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A panel for each machine, a bar for each length; the paper's largest and smallest values are marked beside them.

    The paper does not say to which batches these two belong.
    """
    figure, facets = facet(data, 1, 1.8, extra=0.3)
    for hardware, shown, [panel] in facets:
        table = pivot(shown, "batch").sort_index()
        names = [f"L = {int(length) // 1024}K" for length in table.columns]
        grouped_bars(panel, table, width=0.27, labels=names, fmt="%.1f", padding=1, fontsize=6)
        ends = [claim for claim in printed if claim.hardware == hardware and claim.quantity == value.__name__]
        values = [(-0.55, claim.printed) for claim in ends if claim.printed]
        mark_printed(panel, values, clip_on=False, label="paper: largest and smallest")
        panel.set(title=TITLES[hardware], ylabel="decode speedup")
        panel.margins(y=0.1)
    panel.set_xlabel("batch size B [requests]")
    legend(figure, facets[0].panels)
    return figure
