"""Fig 11 of SARATHI (arXiv 2308.16369): gain against P:D, chunks of 256 beside Orca's best and worst case.

Orca's iterations hold whole prompts. In its best case starts are spread evenly, so that every prompt meets decodes; in
its worst case all requests start together, and it schedules as the baseline does. The best case equals Sarathi with
chunks as long as the prompts, so its peak lies at a much higher P:D.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple

from experiments.plots.style import line_style
from reproduction.papers.claims import Claim, printed_points
from reproduction.papers.frames import select
from reproduction.papers.machines import TITLES, Machines
from reproduction.papers.panels import PANELS, measure_gains, pd_axis
from reproduction.papers.steady import Scheme
from reproduction.parts import facet, grouped_bars, mark_printed

CHUNK = 256
SCHEMES: dict[str, Scheme] = {
    "Orca, worst case": "orca_worst",
    "Orca, best case": "orca_best",
    "Sarathi, C = 256": "sarathi",
}


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Throughput over the baseline's."""
    return measure_gains(machines, say, lambda _: [(series, scheme, CHUNK) for series, scheme in SCHEMES.items()])


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A row for each machine: the highest gain of each scheme as bars, and the gain against P:D for each length."""
    figure, facets = facet(data, 1 + len(PANELS), 2.0, extra=0.5)
    for hardware, shown, [bars, *lines] in facets:
        claims = [claim for claim in printed if claim.hardware == hardware]
        _draw_bars(bars, shown, claims)
        for axes, panel in zip(lines, PANELS, strict=True):
            for style, series in zip((4, 1, 0), SCHEMES, strict=True):
                line = select(shown, length=panel.length, series=series).sort_values("pd_ratio")
                axes.plot(line["pd_ratio"], line["value"], label=series, **line_style(style))
            mark_printed(axes, printed_points(claims, "gain", "pd_ratio", length=panel.length))
            pd_axis(axes, (1, 5, 20, 100))
            axes.sharey(lines[0])
            axes.set_title(panel.title)
        lines[0].set_ylim(shown["value"].min() - 0.02, shown["value"].max() + 0.03)
        lines[0].set_ylabel("throughput / baseline's")
        bars.set(title=TITLES[hardware], ylabel="highest throughput / baseline's", ylim=(0, 1.75))
    ours = (dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)) for axes in facets[0].panels[:2])
    of_bars, of_lines = ours
    handles: list[Any] = [(of_bars.pop(series), of_lines[series]) for series in SCHEMES]  # side by side
    figure.legend(
        [*handles, *of_bars.values()],
        [*SCHEMES, *of_bars],
        loc="outside upper center",
        ncols=4,
        handlelength=4,
        handler_map={tuple: HandlerTuple(ndivide=None)},
    )
    return figure


def _draw_bars(axes: Axes, shown: pd.DataFrame, claims: Sequence[Claim]) -> None:
    """The highest gain of each scheme by length, and what the paper prints of it."""
    table = shown.groupby(["length", "series"], sort=False)["value"].max().unstack()[list(SCHEMES)]
    table = table.loc[[panel.length for panel in PANELS]]
    places = grouped_bars(axes, table, (3, 1, 0), fmt="%.2f", padding=4, fontsize=5.5, rotation=90)
    for series, scheme in SCHEMES.items():
        by_length = [
            (claim.setting["length"], claim.printed)
            for claim in claims
            if claim.quantity in ("gain", "peak_gain") and claim.setting.get("scheme", "sarathi") == scheme
        ]
        x = dict(zip(table.index, places[series], strict=True))
        mark_printed(axes, [(x[length], value) for length, value in by_length if value], markersize=3.5)
    axes.set_xticks(range(len(PANELS)), [panel.title.replace(", ", "\n") for panel in PANELS])
