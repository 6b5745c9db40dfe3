"""Throughput, and its gain over a baseline policy, against the ratio of prefill to decode tokens (SARATHI, Fig 9)."""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch import ConfigError
from experiments.plots.parts import log_x
from experiments.plots.series import choose_runs, label_runs
from experiments.plots.style import MOST_SERIES, add_title, line_style, new_figure, print_style
from experiments.store.tables import load

RATIO, SPEED = "workload.pd_ratio", "throughput.total_tokens_per_second"


@print_style()
def draw(folder: Path, baseline: str = "request_level", runs: str = "") -> Figure:
    """A line for each policy and chunk.

    Args:
        baseline: the policy that gains are relative to; without a run of it, only throughput is shown.
        runs: show only runs whose folder names contain this.

    Raises:
        ConfigError: no finished runs, fewer than two ratios, or too many series.
    """
    frame = choose_runs(load(folder), runs)
    if RATIO not in frame or frame[RATIO].nunique() < 2:
        raise ConfigError(f"{folder}: needs runs with several values of {RATIO}; sweep it with -m {RATIO}=2,5,14,28")
    frame = label_runs(frame, without=[RATIO])
    lines = frame.pivot_table(index=RATIO, columns="label", values=SPEED, sort=False).sort_index()
    frame = frame.sort_values("policy", key=lambda policies: policies != baseline, kind="stable")
    lines = lines[list(dict.fromkeys(frame["label"]))]
    if (count := lines.shape[1]) > MOST_SERIES:
        raise ConfigError(f"{folder}: {count} series are too many; choose with runs=TEXT, a part of folder names")
    bases = frame.loc[frame["policy"] == baseline, "label"].unique()
    figure, [axes] = new_figure(1, 2 if len(bases) else 1, 2.9)
    _draw_lines(axes[0], lines / 1e3, "throughput [1,000 tokens/s]")
    axes[0].set_ylim(bottom=0)
    if len(bases):
        _draw_lines(axes[1], lines.div(lines[bases[0]], axis=0), f"throughput over {bases[0]}")
        axes[1].axhline(1.0, color="#555555", linewidth=0.5)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    add_title(figure, frame)
    return figure


def _draw_lines(axes: Axes, lines: pd.DataFrame, label: str) -> None:
    for index, name in enumerate(lines):
        points = lines[name].dropna()
        axes.plot(points.index, points.to_numpy(), label=str(name), **line_style(index))
    log_x(axes)
    axes.set(xlabel="P:D ratio [prefill / decode tokens]", ylabel=label)
