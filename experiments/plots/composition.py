"""Iterations over time: prefill, decode and padding tokens; requests running and waiting; KV cache."""

from math import ceil
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from cbatch import ConfigError
from experiments.plots.series import load_runs
from experiments.plots.style import DECODE, PADDING, PLAIN, PREFILL, Look, add_title, new_figure, print_style
from experiments.store.tables import read_steps

_MOST_STEPS = 400
"""Iterations that are drawn one by one; of more, at most a third as many means, of several iterations each."""
_TOKENS = {
    "decode": ("num_decode_tokens", DECODE),
    "prefill": ("num_prefill_tokens", PREFILL),
    "padding": ("num_padding_tokens", PADDING),
}
"""Column and colour by kind of token."""


@print_style()
def draw(folder: Path, look: Look = PLAIN) -> Figure:
    """Draws three panels over time. Raises ConfigError: no finished run, or several; it has no iterations."""
    shown = load_runs(folder, look, 1)
    run = shown.iloc[0]
    steps = read_steps(run["folder"])
    if steps.empty:
        raise ConfigError(f"{run['folder']}: the run has no iterations to draw; choose another run")
    drawn, how = _thin_out(steps)
    figure, [[tokens], [requests], [memory]] = new_figure(3, 1, 4.4, ratios=(2, 1, 1), sharex=True)
    shown_tokens = {name: parts for name, parts in _TOKENS.items() if drawn[parts[0]].any()}
    counts = [drawn[column] for column, _ in shown_tokens.values()]
    colours = [colour for _, colour in shown_tokens.values()]
    tokens.stackplot(drawn["started"], *counts, step="post", labels=list(shown_tokens), colors=colours, linewidth=0)
    tokens.set_ylabel("tokens per iteration")
    for name, style in (("running", "-"), ("waiting", "--")):
        requests.plot(drawn["started"], drawn[f"num_{name}"], style, label=name, drawstyle="steps-post")
    requests.set_ylabel("requests")
    used = drawn["kv_blocks_used"] / run["limits.kv_blocks"]
    memory.plot(drawn["started"], used, drawstyle="steps-post", color="black", linewidth=1)
    memory.set(xlabel="time [s]", ylabel="KV cache used")
    memory.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for panel in (tokens, requests, memory):
        panel.set_ylim(bottom=0)
        panel.xaxis.grid(visible=False)
        panel.margins(x=0.005)
    for panel in (tokens, requests):
        panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    add_title(figure, shown, str(run["label"]), note=how, look=look)
    return figure


def _thin_out(steps: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Returns few enough iterations to see, or means of successive ones; and a description of them."""
    if len(steps) <= _MOST_STEPS:
        return steps, "each iteration"
    size = ceil(3 * len(steps) / _MOST_STEPS)
    groups = steps.select_dtypes("number").groupby(np.arange(len(steps)) // size)
    return groups.mean().assign(started=groups["started"].first()), f"means of {size} iterations"
