"""Ablation of SARATHI's tile alignment (arXiv 2308.16369, section 4.4): chunks that fill whole tiles, and chunks that do not.

With B = 18 and C = 256, decodes on top make 273 tokens: a third tile of 128, nearly empty. The paper prints the step (Fig 7)
but not what it costs end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from experiments.config.composition import composed, swept_numbers
from experiments.paper.claims import Claim
from experiments.paper.closed_batch import load_of
from experiments.paper.machines import TITLES, Machines
from experiments.paper.steady import Scheme
from experiments.plots.style import line_style, new_figure, paper_style
from experiments.plots.style import printed as page

EXPERIMENT = "tile_alignment"
SCHEMES: dict[str, Scheme] = {
    "aligned: C tokens with the decodes": "sarathi",
    "unaligned: C tokens and the decodes": "sarathi_unaligned",
}
PAPER = {"a6000": (14, 1.27)}
"""(P:D, gain) that Fig 9 prints for aligned chunks."""
HARDWARE = ("a6000", "h200", "gpu")
REAL_RATIOS = (5, 14, 28, 50)  # with real tokens, which take as long as they take


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Throughput over the baseline's against P:D.

    Columns: hardware, series, pd_ratio, value.
    """
    rows, chunk = [], composed(EXPERIMENT)["chunk"]
    for hardware in HARDWARE:
        if (at := machines.get(hardware)) is None:
            continue
        say(hardware)
        for ratio in REAL_RATIOS if machines.are_real else swept_numbers(EXPERIMENT, "workload.pd_ratio"):
            load = load_of(EXPERIMENT, ratio)
            rows += [(hardware, series, ratio, at.gain(scheme, load, chunk)) for series, scheme in SCHEMES.items()]
    return pd.DataFrame(rows, columns=["hardware", "series", "pd_ratio", "value"])


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A row for each machine: the gain of both, and the share of aligned throughput that unaligned chunks lose."""
    machines = list(dict.fromkeys(data["hardware"]))
    with page():
        figure, axes = new_figure(len(machines), 2, 0.4 + 2.2 * len(machines))
        for (gains, losses), hardware in zip(axes, machines, strict=True):
            table = data[data["hardware"] == hardware].pivot_table(index="pd_ratio", columns="series", values="value")
            for index, series in enumerate(SCHEMES):
                gains.plot(table.index, table[series], label=series, **line_style(index))
            aligned, unaligned = (table[series] for series in SCHEMES)
            losses.plot(table.index, 100 * (1 - unaligned / aligned), **line_style(2))
            if hardware in PAPER:
                gains.plot(*PAPER[hardware], **paper_style())
            _axes(gains, f"{TITLES[hardware]}: C = {composed(EXPERIMENT)['chunk']}", "throughput over the baseline's")
            _axes(losses, f"{TITLES[hardware]}: what unaligned chunks cost", "throughput lost [%]")
            losses.set_ylim(bottom=min(0, losses.get_ylim()[0]))
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


def _axes(panel: Axes, title: str, label: str) -> None:
    panel.set_title(title, loc="left")
    panel.set_xscale("log")
    panel.set_xticks([2, 5, 14, 28, 50, 100, 200])
    panel.xaxis.set_major_formatter(ScalarFormatter())
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("P:D, prompt tokens / output tokens")
    panel.set_ylabel(label)
    panel.grid(visible=True)
