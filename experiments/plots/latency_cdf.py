"""Distributions of the latencies that a client sees: time to first token, time between tokens, end to end."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from experiments.plots.parts import label_log
from experiments.plots.series import load_series, say
from experiments.plots.style import add_title, line_style, new_figure, print_style
from experiments.store.runs import Omitted
from experiments.store.tables import load_requests, time_between_tokens

_MOST_POINTS = 1000  # per curve: a million gaps would make a PDF that no viewer opens
_NAMES = ("time to first token [s]", "time between tokens [ms]", "end-to-end latency [s]")

Values = NDArray[np.float64]


@print_style()
def draw(folder: Path, runs: str = "") -> Figure:
    """A line for each policy and whatever else varies; of several seeds, all requests, and a band of the single runs.

    Args:
        runs: show only runs whose folder names contain this.

    Raises:
        ConfigError: no finished runs, or too many.
    """
    frame = load_series(folder, runs, ())
    figure, [axes] = new_figure(1, 3, 2.7)
    for index, (label, group) in enumerate(frame.groupby("label", sort=False)):
        latencies = [_latencies(run) for run in group["folder"]]
        for panel, name, values in zip(axes, _NAMES, zip(*latencies, strict=True), strict=True):
            if not any(map(len, values)):
                say([Omitted(str(label), f"has no {name.partition(' [')[0]}")])
            _draw_distribution(panel, values, str(label), index)
    for panel, name in zip(axes, _NAMES, strict=True):
        panel.set(xlabel=name, ylim=(0, 1.01), xscale="log")
        label_log(panel.xaxis)
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0].set_ylabel("share of requests, or of gaps")
    add_title(figure, frame, handles=axes[0].get_legend_handles_labels()[0])
    return figure


def _latencies(run: str) -> list[Values]:
    requests = load_requests(run)
    latencies = (requests["ttft_seconds"], time_between_tokens(run) * 1e3, requests["end_to_end_seconds"])
    return [np.asarray(values.dropna(), np.float64) for values in latencies]


def _draw_distribution(axes: Axes, runs: tuple[Values, ...], label: str, index: int) -> None:
    """The cumulative distribution of all runs' values, thinned out to quantiles if there are many; a band of the runs'."""
    values = np.concatenate(runs)
    shares = np.linspace(0, 1, min(len(values), _MOST_POINTS))  # empty if, say, no request has a second token
    style = {**line_style(index), "markevery": (len(shares) // 12, max(len(shares) // 6, 1))}
    quantiles = np.quantile(values, shares) if len(values) else values
    axes.plot(quantiles, shares, label=label, drawstyle="steps-post", **style)
    if len(single := [np.quantile(run, shares) for run in runs if len(run)]) > 1:
        low, high = np.min(single, axis=0), np.max(single, axis=0)
        axes.fill_betweenx(shares, low, high, color=style["color"], alpha=0.2, linewidth=0)
