"""Fig 8 of SARATHI (arXiv 2308.16369): how much cheaper a decode is beside a chunk than alone, against the batch size, C = 256.

A decode beside a chunk costs what the mixed iteration takes beyond the chunk alone, for each decode (Table 2). The gain
falls with the batch, which shares the weights among its decodes by itself, and with the length, whose attention nothing
shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.paper.claims import Claim
from experiments.paper.machines import TITLES, Machines
from experiments.paper.panels import PANELS
from experiments.paper.quantities import decode_speedup
from experiments.plots.style import fill_style, new_figure, paper_style
from experiments.plots.style import printed as page

CHUNK = 256
HARDWARE = ("a6000", "a100", "h200-13b", "gpu")
FITTING_33B = {1024: 10, 2048: 5, 3072: 3}
"""The largest batch of LLaMA-33B by length (Table 4)."""


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Speedup of a decode, in batches up to the largest that fits.

    Columns: hardware, series (L), batch, value.
    """
    fitting = dict(PANELS)
    rows = [
        (hardware, length, batch, decode_speedup(at, length, batch, CHUNK))
        for hardware in HARDWARE
        if (at := machines.get(hardware))
        for length, most in (FITTING_33B if hardware == "a100" else fitting).items()
        for batch in sorted({*range(2, most, 2), most})
    ]
    return pd.DataFrame(rows, columns=["hardware", "series", "batch", "value"])


def largest(data: pd.DataFrame, hardware: str) -> float:
    return float(data[data["hardware"] == hardware]["value"].max())


def smallest(data: pd.DataFrame, hardware: str) -> float:
    return float(data[data["hardware"] == hardware]["value"].min())


def share_falling(data: pd.DataFrame, hardware: str) -> float:
    """Share of the steps to the next larger batch, or to the next longer requests, at which the speedup falls."""
    table = data[data["hardware"] == hardware].pivot_table(index="batch", columns="series", values="value")
    steps = np.concatenate([np.diff(table.to_numpy(), axis=axis).ravel() for axis in (0, 1)])
    return float(np.mean(steps[~np.isnan(steps)] < 0))


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A panel for each machine, a bar for each length; lines where the paper's largest and smallest values are."""
    machines = list(dict.fromkeys(data["hardware"]))
    with page():
        figure, axes = new_figure(len(machines), 1, 0.3 + 1.8 * len(machines))
        for [panel], hardware in zip(axes, machines, strict=True):
            _bars(panel, data[data["hardware"] == hardware])
            _mark(panel, [claim for claim in printed if claim.hardware == hardware])
            panel.set_title(TITLES[hardware], loc="left")
            panel.set_ylabel("decode speedup")
            panel.grid(visible=True, axis="y")
            panel.margins(y=0.1)
        axes[-1][0].set_xlabel("batch size B [requests]")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4)
    return figure


def _bars(panel: Axes, shown: pd.DataFrame) -> None:
    """The bars of a batch stand around its tick, however many there are."""
    batches, lengths, width = sorted(set(shown["batch"])), list(dict.fromkeys(shown["series"])), 0.27
    groups = {batch: shown[shown["batch"] == batch].set_index("series")["value"] for batch in batches}
    for index, length in enumerate(lengths):
        here = [(tick, group) for tick, group in enumerate(groups.values()) if length in group.index]
        places = [tick + width * (list(group.index).index(length) - (len(group) - 1) / 2) for tick, group in here]
        bars = panel.bar(
            places, [group[length] for _, group in here], width, label=f"L = {length // 1024}K", **fill_style(index)
        )
        panel.bar_label(bars, fmt="%.1f", padding=1, fontsize=6)
    panel.set_xticks(range(len(batches)), list(map(str, batches)))


def _mark(panel: Axes, claims: Sequence[Claim]) -> None:
    """The ends of the range that the paper prints, beside the bars: it does not say of which batches they are."""
    values = [claim.printed for claim in claims if claim.quantity in ("largest", "smallest") and claim.printed]
    if values:
        panel.plot(
            [-0.55] * len(values), values, clip_on=False, **(paper_style() | {"label": "paper: largest and smallest"})
        )
