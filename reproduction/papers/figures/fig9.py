"""Fig 9 of SARATHI (arXiv 2308.16369): throughput over the baseline's against P:D, for chunks of 128, 256 and 512.

The gain is highest where the chunks of a prompt and the decodes of an output take the same number of iterations. With
the chunk C' = C - (B-1) that fills the tiles together with B-1 decodes, that is at P:D = C/(B-1) - 1.
"""

from collections.abc import Callable, Iterator, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots.style import line_style
from reproduction.papers.claims import Claim, printed_points
from reproduction.papers.frames import select
from reproduction.papers.machines import TITLES, Machines
from reproduction.papers.panels import PANELS, Panel, measure_gains, pd_axis, predicted_peak
from reproduction.papers.steady import Scheme
from reproduction.parts import facet, legend, mark_printed

CHUNKS = (128, 256, 512)
PEAK = "peak predicted, C/(B-1) - 1"


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Throughput over the baseline's; series: C, tokens."""

    def lines(panel: Panel) -> Iterator[tuple[int, Scheme, int]]:
        for chunk in CHUNKS if not machines.are_real or panel == PANELS[0] else (256,):
            yield chunk, "sarathi", chunk

    return measure_gains(machines, say, lines)


def best_ratio(data: pd.DataFrame, hardware: str, chunk: int, length: int = 1024) -> float:
    """The measured P:D at which a line is highest."""
    line = select(data, hardware=hardware, series=chunk, length=length)
    return float(line["pd_ratio"].iloc[int(line["value"].argmax())])


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A row for each machine, a panel for each length; vertical lines where the peaks are predicted."""
    figure, facets = facet(data, len(PANELS), 2.1, extra=0.5)
    for hardware, shown, row in facets:
        for axes, panel in zip(row, PANELS, strict=True):
            if axes is not row[0]:
                axes.sharey(row[0])
            _draw_lines(axes, select(shown, length=panel.length), panel)
            mark_printed(axes, printed_points(printed, "gain", "pd_ratio", hardware=hardware, length=panel.length))
            pd_axis(axes)
            axes.set_title(f"{TITLES[hardware]}: {panel.title}")
        row[0].set_ylabel("throughput over the baseline's")
    legend(figure, facets[0].panels[:1], ncols=5, last=PEAK)
    return figure


def _draw_lines(axes: Axes, shown: pd.DataFrame, panel: Panel) -> None:
    axes.axhline(1, color="black", linewidth=0.6)
    for index, chunk in enumerate(CHUNKS):
        line, style = select(shown, series=chunk).sort_values("pd_ratio"), line_style(index)
        if line.empty:
            continue
        axes.plot(line["pd_ratio"], line["value"], label=f"C = {chunk}", **style)
        thin = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 0.7, "zorder": 1}
        axes.axvline(predicted_peak(chunk, panel.batch), label="_" if index else PEAK, **thin)
