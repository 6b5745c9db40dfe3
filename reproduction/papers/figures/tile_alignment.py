"""Ablation of SARATHI's tile alignment (arXiv 2308.16369, section 4.4): chunks that fill whole tiles, or do not.

With B = 18 and C = 256, adding decodes on top of the chunk makes 273 tokens: a third tile of 128, nearly empty. The
paper prints the step (Fig 7) but not its cost end to end.
"""

from collections.abc import Callable, Iterator, Sequence

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots.style import line_style
from reproduction.experiment_files import composed, swept_numbers
from reproduction.papers.claims import Claim
from reproduction.papers.frames import Row, data_frame
from reproduction.papers.machines import TITLES, Machines
from reproduction.papers.steady import Scheme, load_of
from reproduction.parts import facet, legend, log_x, mark_printed

EXPERIMENT = "tile_alignment"
SCHEMES: dict[str, Scheme] = {
    "aligned: C tokens with the decodes": "sarathi",
    "unaligned: C tokens and the decodes": "sarathi_unaligned",
}
PAPER = {"a6000": (14, 1.27)}
"""(P:D, gain) that Fig 9 prints for aligned chunks."""
HARDWARE = ("a6000", "h200", "gpu")
REAL_RATIOS = (5, 14, 28, 50)
"""P:D where every point is served with real tokens."""


@data_frame("hardware", "series", "pd_ratio", "value")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """Throughput over the baseline's against P:D."""
    chunk = composed(EXPERIMENT)["chunk"]
    for hardware, at in machines.available(HARDWARE):
        say(hardware)
        for ratio in REAL_RATIOS if machines.are_real else swept_numbers(EXPERIMENT, "workload.pd_ratio"):
            load = load_of(EXPERIMENT, ratio)
            for series, scheme in SCHEMES.items():
                yield hardware, series, ratio, at.gain(scheme, load, chunk)


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A row for each machine: both gains, and the share of aligned throughput that unaligned chunks lose."""
    figure, facets = facet(data, 2, 2.2, extra=0.4)
    for hardware, shown, [gains, losses] in facets:
        table = shown.pivot_table(index="pd_ratio", columns="series", values="value")
        for index, series in enumerate(SCHEMES):
            gains.plot(table.index, table[series], label=series, **line_style(index))
        aligned, unaligned = (table[series] for series in SCHEMES)
        losses.plot(table.index, 100 * (1 - unaligned / aligned), **line_style(2))
        mark_printed(gains, [PAPER[hardware]] if hardware in PAPER else [])
        gains.set_title(f"{TITLES[hardware]}: C = {composed(EXPERIMENT)['chunk']}")
        gains.set_ylabel("throughput over the baseline's")
        losses.set(title=f"{TITLES[hardware]}: cost of unaligned chunks", ylabel="throughput lost [%]")
        for panel in (gains, losses):
            log_x(panel, [2, 5, 14, 28, 50, 100, 200])
            panel.set_xlabel("P:D, prompt tokens / output tokens")
        losses.set_ylim(bottom=min(0, losses.get_ylim()[0]))
    legend(figure, facets[0].panels[:1], ncols=3)
    return figure
