"""Draws iterations over time: prefill, decode and padding tokens; running and waiting requests; KV cache; parts of prompts."""

from math import ceil
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch import ConfigError
from experiments.plots.series import load_runs
from experiments.plots.style import DECODE, PADDING, PLAIN, PREFILL, Look, add_title, new_figure, print_style
from experiments.store.csv_tables import REPLICA
from experiments.store.tables import read_requests, read_steps

_MOST_STEPS = 400
"""Maximum iterations drawn one by one. Longer runs are drawn as at most a third as many means over several iterations."""
_TOKENS = {
    "decode": ("num_decode_tokens", DECODE),
    "prefill": ("num_prefill_tokens", PREFILL),
    "padding": ("num_padding_tokens", PADDING),
}
"""Column and colour by kind of token."""
_PARTS = {"found": "#009E73", "computed": PREFILL, "recomputed": "#D55E00"}
_MOST_REPLICAS = 4
_MOST_PARTS = 60
"""Maximum intervals of time, each with the prompts of the requests admitted in it."""


@print_style()
def draw(folder: Path, look: Look = PLAIN, replicas: tuple[int, ...] = ()) -> Figure:
    """Draws three panels over time, and with a prefix cache a fourth panel with the parts of prompts admitted at each time.

    Raises ConfigError if there is no finished run, there are several runs, or the run has no iterations or no such replica.

    Args:
        replicas: the replicas that have a column each; by default the first four, if there are several.
    """
    shown = load_runs(folder, look, 1)
    run = shown.iloc[0]
    steps, served = read_steps(run["folder"]), read_requests(run["folder"])
    if steps.empty:
        raise ConfigError(f"{run['folder']}: the run has no iterations to draw; choose another run")
    known = range(int(run["backend.replicas"])) if REPLICA in steps else range(0)
    if unknown := {*replicas} - {*known}:
        raise ConfigError(f"replicas={min(unknown)}: no such replica; the run has {max(len(known), 1)}, counted from 0")
    chosen = replicas or known[:_MOST_REPLICAS]
    parts = [(steps[steps[REPLICA] == i], served[served[REPLICA] == i]) for i in chosen] or [(steps, served)]
    cached, how = "cached_tokens" in served, ""
    height, ratios = 4.4 + 0.9 * cached, (2, *[1] * (2 + cached))
    figure, rows = new_figure(3 + cached, len(parts), height, ratios=ratios, sharex=True, sharey="row")
    for column, (iterations, requests) in enumerate(parts):
        panels = [row[column] for row in rows]
        how = _draw_column(panels, iterations, requests, run["limits.kv_blocks"]) if len(iterations) else how
        panels[0].set_title(f"replica {chosen[column]}{'' if len(iterations) else ', idle'}" if chosen else "")
        panels[-1].set_xlabel("time [s]")
    for panel in figure.axes:
        panel.set_ylim(bottom=0)
        panel.xaxis.grid(visible=False)
        panel.margins(x=0.005)
    for row, name in zip(rows, ("tokens per iteration", "requests", "KV [%]", "prompts [%]"), strict=False):
        row[0].set_ylabel(name)
    for row in (*rows[:2], *rows[3:]):
        handles = next(filter(None, (panel.get_legend_handles_labels()[0] for panel in row)), [])
        row[-1].legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    add_title(figure, shown, str(run["label"]), note=how, look=look)
    return figure


def _draw_column(panels: list[Axes], steps: pd.DataFrame, requests: pd.DataFrame, kv_blocks: int) -> str:
    """Draws the iterations of an engine. Returns a description of the drawn iterations."""
    drawn, how = _thin_out(steps)
    shown = {name: parts for name, parts in _TOKENS.items() if drawn[parts[0]].any()}
    counts, colours = [drawn[column] for column, _ in shown.values()], [colour for _, colour in shown.values()]
    panels[0].stackplot(drawn["started"], *counts, step="post", labels=list(shown), colors=colours, linewidth=0)
    for name, style in (("running", "k-"), ("waiting", "r--")):
        panels[1].plot(drawn["started"], drawn[f"num_{name}"], style, label=name, drawstyle="steps-post", linewidth=1)
    used = 100 * drawn["kv_blocks_used"] / kv_blocks
    panels[2].plot(drawn["started"], used, drawstyle="steps-post", color="black", linewidth=1)
    for panel in panels[3:]:
        _draw_prompts(panel, requests, steps["started"].max())
    return how


def _draw_prompts(panel: Axes, requests: pd.DataFrame, end: float) -> None:
    """Draws the shares of prompt tokens for the requests admitted in each interval of time up to `end`."""
    admitted = requests.dropna(subset="admitted")
    edges = np.linspace(0, end, min(_MOST_PARTS, max(len(admitted) // 10, 1)) + 1)
    kinds = {
        "found": admitted["cached_tokens"],
        "computed": admitted["prompt_tokens"] - admitted["cached_tokens"],
        "recomputed": admitted["recomputed_tokens"],
    }
    kinds = {name: tokens for name, tokens in kinds.items() if tokens.any()}
    sums = np.array([np.histogram(admitted["admitted"], edges, weights=tokens)[0] for tokens in kinds.values()])
    shares = np.pad(100 * sums / np.maximum(sums.sum(axis=0), 1), ((0, 0), (0, 1)), mode="edge")
    colours = [_PARTS[name] for name in kinds]
    panel.stackplot(edges, *shares, step="post", labels=list(kinds), colors=colours, linewidth=0)
    panel.set_ylim(0, 100)


def _thin_out(steps: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Returns the iterations, or means over successive iterations if there are too many, and a description. Pauses are rows of zeros."""
    drawn, how = steps.select_dtypes("number"), "each iteration"
    longest = max((steps["ended"] - steps["started"]).max(), steps["ended"].max() / _MOST_STEPS)
    before_pause = steps["started"].shift(-1) - steps["ended"] > longest
    pauses = drawn[before_pause].mul(0).assign(started=steps.loc[before_pause, "ended"])
    if len(steps) > _MOST_STEPS:
        size = ceil(3 * len(steps) / _MOST_STEPS)
        groups = drawn.groupby([before_pause.cumsum().shift(fill_value=0), np.arange(len(steps)) // size])
        drawn, how = groups.mean().assign(started=groups["started"].first()), f"means of {size} iterations"
    return pd.concat([drawn, pauses]).sort_values("started", kind="stable"), how
