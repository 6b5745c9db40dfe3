"""What iterations are made of over time: prefill, decode and padding tokens; requests running and waiting; KV cache."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from cbatch import ConfigError
from experiments.plots.series import chosen, labelled, single
from experiments.plots.style import DECODE, PADDING, PREFILL, line_style, new_figure, printed, title
from experiments.store.tables import load, load_steps

_MOST_STEPS = 400
"""Iterations that are drawn one by one; of more, the means over as many equal spans of time are drawn."""


def draw(folder: Path, runs: str = "", begin: float = 0.0, end: float = float("inf")) -> Figure:
    """Three panels over time.

    Args:
        runs: the run whose folder's name holds this.
        begin, end: seconds of the run that are shown.

    Raises:
        ConfigError: no finished run, several, or no iteration in this time.
    """
    shown = labelled(chosen(load(folder), runs))
    run = single(shown)
    steps = load_steps(run["folder"])
    steps = steps[(steps["started"] >= begin) & (steps["started"] <= end)]
    if steps.empty:
        raise ConfigError(f"begin={begin:g} end={end:g}: no iteration starts in these seconds")
    drawn, how = _thinned(steps)
    time = drawn["started"].to_numpy()
    with printed():
        figure, [[tokens], [requests], [memory]] = new_figure(3, 1, 4.4, ratios=(2, 1, 1), sharex=True)
        _tokens(tokens, drawn)
        for index, (column, label) in enumerate((("num_running", "running"), ("num_waiting", "waiting"))):
            style = {**line_style(index), "marker": "None"}
            requests.plot(time, drawn[column], label=label, drawstyle="steps-post", **style)
        requests.set_ylabel("requests")
        memory.plot(
            time, drawn["kv_blocks_used"] / run["limits.kv_blocks"], drawstyle="steps-post", color="black", linewidth=1
        )
        memory.set_ylabel("KV cache used")
        memory.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        memory.set_xlabel("time [s]")
        for panel in (tokens, requests, memory):
            panel.set_ylim(bottom=0)
            panel.grid(visible=True, axis="y")
            panel.margins(x=0.005)
        for panel in (tokens, requests):
            panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        title(figure, shown, str(run["label"]), note=how)
    return figure


def _tokens(axes: Axes, steps: pd.DataFrame) -> None:
    columns = {
        "decode": ("num_decode_tokens", DECODE),
        "prefill": ("num_prefill_tokens", PREFILL),
        "padding": ("num_padding_tokens", PADDING),
    }
    shown = {name: parts for name, parts in columns.items() if steps[parts[0]].any()}
    axes.stackplot(
        steps["started"],
        *(steps[column] for column, _ in shown.values()),
        step="post",
        labels=list(shown),
        colors=[colour for _, colour in shown.values()],
        linewidth=0,
    )
    axes.set_ylabel("tokens an iteration")


def _thinned(steps: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Few enough iterations to see, and how they came about."""
    if len(steps) <= _MOST_STEPS:
        return steps, "each iteration"
    begin, end = steps["started"].min(), steps["started"].max()
    span = ((steps["started"] - begin) / (end - begin) * _MOST_STEPS).astype(int).clip(upper=_MOST_STEPS - 1)
    return steps.select_dtypes("number").groupby(span).mean(), f"means over {(end - begin) / _MOST_STEPS:.3g} s"
