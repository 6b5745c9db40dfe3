"""Distributions of the latencies that a client sees: time to first token, time between tokens, end to end."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, PercentFormatter
from numpy.typing import NDArray

from experiments.plots.parts import log_x
from experiments.plots.series import load_runs
from experiments.plots.style import add_title, line_style, new_figure, print_style
from experiments.store.tables import load_requests, time_between_tokens

_MOST_POINTS = 1000  # per curve: a million gaps would make a PDF that no viewer opens


@print_style()
def draw(folder: Path, runs: str = "") -> Figure:
    """A line for each run.

    Args:
        runs: show only runs whose folder names contain this.

    Raises:
        ConfigError: no finished runs, or too many.
    """
    frame = load_runs(folder, runs)
    figure, [axes] = new_figure(1, 3, 2.7)
    for index, (run, label) in enumerate(zip(frame["folder"], frame["label"], strict=True)):
        requests = load_requests(run)
        curves = (requests["ttft_seconds"], time_between_tokens(run) * 1e3, requests["end_to_end_seconds"])
        for panel, values in zip(axes, curves, strict=True):
            _draw_distribution(panel, values.dropna().to_numpy(), label, index)
    names = ("time to first token [s]", "time between tokens [ms]", "end-to-end latency [s]")
    for panel, name in zip(axes, names, strict=True):
        log_x(panel)
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        panel.set(xlabel=name, ylim=(0, 1.01))
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0].set_ylabel("share of requests, or of gaps")
    add_title(figure, frame, handles=axes[0].get_legend_handles_labels()[0])
    return figure


def _draw_distribution(axes: Axes, values: NDArray[np.float64], label: str, index: int) -> None:
    """The cumulative distribution, thinned out to quantiles if there are many values."""
    shares = np.linspace(0, 1, min(len(values), _MOST_POINTS))  # empty if, say, no request has a second token
    style = {**line_style(index), "markevery": (len(shares) // 12, max(len(shares) // 6, 1))}
    quantiles = np.quantile(values, shares) if len(values) else values
    axes.plot(quantiles, shares, label=label, drawstyle="steps-post", **style)
