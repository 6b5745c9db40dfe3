"""Throughput, and its gain over a baseline policy, against the ratio of prefill to decode tokens (SARATHI, Fig 9)."""

import math
from pathlib import Path
from textwrap import fill

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots.parts import apart, draw_series, log_x
from experiments.plots.series import coincide_text, describe_points, leave_out, load_series, summarize_series, swept
from experiments.plots.style import add_title, new_figure, print_style

RATIOS, SPEED = ("workload.pd_ratio", "workload.lengths.pd_ratio"), "throughput.total_tokens_per_second"


@print_style()
def draw(folder: Path, baseline: str = "request_level", runs: str = "") -> Figure:
    """A line for each policy, chunk and whatever else varies; of several seeds, the mean, and a band around it.

    Args:
        baseline: the policy that gains are relative to; without a run of it, only throughput is shown.
        runs: show only runs whose folder names contain this.

    Raises:
        ConfigError: no finished runs, fewer than two ratios, or too many series.
    """
    frame = load_series(folder, runs, RATIOS)
    ratio = swept(frame, RATIOS, folder, "2,5,14,28")
    frame = leave_out(frame, (ratio, SPEED))
    frame = pd.concat([frame[frame["policy"] == baseline], frame[frame["policy"] != baseline]])
    labels = list(dict.fromkeys(frame["label"]))
    points = summarize_series(frame, ratio, SPEED)
    bases = frame.loc[frame["policy"] == baseline, "label"].unique()
    figure, [axes] = new_figure(1, 2 if len(bases) else 1, 3.2)
    _draw_lines(axes[0], points, labels, ratio, 1e3)
    axes[0].set(ylabel="throughput [1,000 tokens/s]", ylim=(0, None))
    if len(bases):
        speeds = points.loc[[bases[0]]].set_index(ratio)["mean"]
        _draw_lines(axes[1], points, labels, ratio, points[ratio].map(speeds))
        axes[1].axhline(1.0, color="#555555", linewidth=0.5)
        axes[1].set_ylabel(fill(f"throughput over {bases[0]}", 30))
    note, below = describe_points(frame, ratio), coincide_text(frame, [ratio, SPEED])
    add_title(figure, frame, handles=axes[0].get_legend_handles_labels()[0], note=note, below=below)
    return figure


def _draw_lines(
    axes: Axes, points: pd.DataFrame, labels: list[str], ratio: str, unit: "float | pd.Series[float]"
) -> None:
    figures = ["mean", "low", "high"]
    scaled = points.assign(**points[figures].div(unit, axis=0))
    for index, label in enumerate(labels):
        draw_series(axes, scaled.loc[[label]], ratio, label, index)
    log_x(axes, apart(points[ratio], 0.07 * math.log(points[ratio].max() / points[ratio].min())))
    axes.set_xlabel("P:D ratio [prefill / decode tokens]")
