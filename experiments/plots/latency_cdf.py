"""Distributions of the latencies that a client sees: time to first token, time between tokens, end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray

from experiments.plots.series import chosen, few, labelled
from experiments.plots.style import line_style, new_figure, printed, title
from experiments.store.tables import load, load_requests, time_between_tokens

_MOST_POINTS = 1000  # of a curve; a million gaps would make a PDF that no viewer opens


def draw(folder: Path, runs: str = "") -> Figure:
    """A line for each run.

    Args:
        runs: show only runs whose folder's name holds this.

    Raises:
        ConfigError: no finished runs, or too many.
    """
    frame = few(labelled(chosen(load(folder), runs)))
    with printed():
        figure, [axes] = new_figure(1, 3, 2.7)
        for index, (run, label) in enumerate(zip(frame["folder"], frame["label"], strict=True)):
            requests = load_requests(run)
            curves = (requests["ttft_seconds"], time_between_tokens(run) * 1e3, requests["end_to_end_seconds"])
            for panel, values in zip(axes, curves, strict=True):
                _plot(panel, values.dropna().to_numpy(), label, index)
        names = ("time to first token [s]", "time between tokens [ms]", "end-to-end latency [s]")
        for panel, name in zip(axes, names, strict=True):
            panel.set_xlabel(name)
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            panel.grid(visible=True)
            panel.set_ylim(0, 1.01)
            panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes[0].set_ylabel("share of requests, or of gaps")
        title(figure, frame, handles=axes[0].get_legend_handles_labels()[0])
    return figure


def _plot(axes: Axes, values: NDArray[np.float64], label: str, index: int) -> None:
    """The cumulative distribution, thinned out to quantiles where there are many values."""
    shares = np.linspace(0, 1, min(len(values), _MOST_POINTS))  # none where no request has a second token, say
    style = {**line_style(index), "markevery": (len(shares) // 12, max(len(shares) // 6, 1))}
    quantiles = np.quantile(values, shares) if len(values) else values
    axes.plot(quantiles, shares, label=label, drawstyle="steps-post", **style)
