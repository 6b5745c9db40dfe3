"""Draws iterations over time: their tokens; running and waiting requests; KV cache; utilisation; parts of prompts."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cbatch import ConfigError
from cbatch.results.utilisation import device_seconds, machines_of, windows_of
from experiments.plots.parts import PlainNumbers
from experiments.plots.series import load_runs
from experiments.plots.style import DECODE, PADDING, PLAIN, PREFILL, Look, add_title, new_figure, print_style
from experiments.store.csv_tables import ENERGY, POOL, PREFILLED_ON, REPLICA
from experiments.store.tables import read_requests, read_steps

_MOST_STEPS = 400
"""Maximum iterations drawn one by one. Longer runs are drawn as at most a third as many means over several iterations."""
_TOKENS = {
    "decode": ("num_decode_tokens", DECODE),
    "prefill": ("num_prefill_tokens", PREFILL),
    "padding": ("num_padding_tokens", PADDING),
}
"""Column and colour by kind of token."""
SHARES, POWER, PROMPTS = "used [%]", "power [W]", "prompts [%]"
_PARTS = {"found": "#009E73", "computed": PREFILL, "recomputed": "#D55E00"}
_SHARES = {"mbu": ("#8FC1E3", 2.5), "mfu": ("black", 1)}  # colour and width: lines that cross at each step
_STEPS = [1, 2, 2.5, 3, 4, 5, 10]  # between ticks
_MOST_REPLICAS = 4
_MOST_PARTS = 60  # maximum intervals of time, each with the prompts of the requests admitted in it


@print_style()
def draw(folder: Path, look: Look = PLAIN, replicas: tuple[int, ...] = ()) -> Figure:
    """Draws panels over time: tokens, requests, KV cache, MFU and MBU where the GPU's peak is known, the power of each replica's GPUs where
    it is measured or predicted, and with a prefix cache the parts of prompts admitted at each time, at the replica that computed them: of a request
    that moved, `recomputed` includes what its decoder computed again.

    Raises ConfigError if there is no finished run, there are several runs, or the run has no iterations or no such replica.

    Args:
        replicas: the replicas that have a column each; by default all, or of more than four the first four that had iterations.
    """
    shown = load_runs(folder, look, 1)
    run = shown.iloc[0]
    steps, served = read_steps(run["folder"]), read_requests(run["folder"])
    if PREFILLED_ON in served:
        served[REPLICA] = served[PREFILLED_ON].fillna(served[REPLICA])
    if steps.empty:
        raise ConfigError(f"{run['folder']}: the run has no iterations to draw; choose another run")
    known = range(int(run["backend.replicas"])) if REPLICA in steps else range(0)
    if unknown := {*replicas} - {*range(max(len(known), 1))}:
        raise ConfigError(f"replicas={min(unknown)}: no such replica; the run has {max(len(known), 1)}, counted from 0")
    ran = sorted({*steps[REPLICA]}) if len(known) > _MOST_REPLICAS else known
    chosen = known and (replicas or ran[:_MOST_REPLICAS])
    parts = [(steps[steps[REPLICA] == i], served[served[REPLICA] == i]) for i in chosen] or [(steps, served)]
    about = run["summary"]["about"]
    pools = [f" ({name})" for name, pool in about.get("pools", {}).items() for _ in range(pool["replicas"])]
    stated = about.get("utilisation", {})
    work = None if "work" not in stated or "num_scores" not in steps else stated
    power = _readings(Path(run["folder"]), max(len(known), 1), about.get("pools", {}))
    if power is None and work and "watts" in work:
        scaled = "lives" in run["summary"].get("replicas", {})
        own = {i: steps[steps[REPLICA] == i] for i in known} or {0: steps}
        power = [_predicted(part, work, i, part if scaled else steps) for i, part in own.items()]
    names = ["tokens per iteration", "requests", "KV [%]", *[SHARES] * bool(work), *[POWER] * (power is not None)]
    names += [PROMPTS] * ("cached_tokens" in served)
    height, ratios, how = 1.7 + 0.9 * len(names), (2, *[1] * (len(names) - 1)), ""
    figure, rows = new_figure(len(names), len(parts), height, ratios=ratios, sharex=True, sharey="row")
    for column, (iterations, requests) in enumerate(parts):
        panels = {name: row[column] for name, row in zip(names, rows, strict=True)}
        if power is not None:
            watts = power[chosen[column] if chosen else 0]
            panels[POWER].plot(watts.index, watts, drawstyle="steps-post", color="black", linewidth=1)
        if len(iterations):
            iterations = _with_shares(iterations, work, chosen[column] if chosen else 0)
            pool = about["pools"][iterations[POOL].iloc[0]] if POOL in iterations else about
            how = _draw_column(panels, iterations, requests, pool["limits"]["kv_blocks"])
        idle = "" if len(iterations) else ", idle"
        replica = f"replica {chosen[column]}{pools[chosen[column]] if pools else ''}{idle}" if chosen else ""
        rows[0][column].set_title(replica)
        rows[-1][column].set_xlabel("time [s]")
    _finish(rows, names, room=not look.size or look.size[1] >= 1 + 0.7 * len(names))  # inches
    if len(chosen) < len(known):
        how += f", {len(chosen)} of {len(known)} replicas"
    add_title(figure, shown, str(run["label"]), note=how, look=look)
    return figure


def _finish(rows: Sequence[Sequence[Axes]], names: Sequence[str], room: bool) -> None:
    """Scales and names the rows of panels, each with a legend at its end. room: for as many ticks in each row."""
    for row, name in zip(rows, names, strict=True):
        for panel in row:
            panel.xaxis.grid(visible=False)
            panel.margins(x=0.005)
        ticks, top = MaxNLocator(4, steps=_STEPS), max(0, *(panel.dataLim.y1 for panel in row)) or 1
        if room:
            row[0].yaxis.set_major_locator(ticks)
        row[0].yaxis.set_major_formatter(PlainNumbers())
        row[0].set(ylabel=name, ylim=(0, ticks.tick_values(0, top * (1 - 1e-9))[-1]))  # sums of shares may exceed 100
        handles = {drawn.get_label(): drawn for panel in row for drawn in panel.get_legend_handles_labels()[0]}
        if handles:
            row[-1].legend(handles=[*handles.values()], loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_column(panels: Mapping[str, Axes], steps: pd.DataFrame, requests: pd.DataFrame, kv_blocks: int) -> str:
    """Draws the iterations of an engine. Returns a description of the drawn iterations."""
    tokens, counted, held, *_ = panels.values()
    drawn, how = _thin_out(steps)
    shown = {name: parts for name, parts in _TOKENS.items() if drawn[parts[0]].any()}
    counts, colours = [drawn[column] for column, _ in shown.values()], [colour for _, colour in shown.values()]
    tokens.stackplot(drawn["started"], *counts, step="post", labels=list(shown), colors=colours, linewidth=0)
    for name, style in (("running", "k-"), ("waiting", "r--")):
        counted.plot(drawn["started"], drawn[f"num_{name}"], style, label=name, drawstyle="steps-post", linewidth=1)
    used = 100 * drawn["kv_blocks_used"] / kv_blocks
    held.plot(drawn["started"], used, drawstyle="steps-post", color="black", linewidth=1)
    for name, (color, width) in _SHARES.items() if SHARES in panels else ():
        values = 100 * drawn[name] / drawn["device_seconds"].where(drawn["device_seconds"] > 0)
        [line] = panels[SHARES].plot(drawn["started"], values, label=name.upper(), drawstyle="steps-post")
        line.set(color=color, linewidth=width)
    if PROMPTS in panels:
        _draw_prompts(panels[PROMPTS], requests, steps["started"].max())
    return how


def _readings(folder: Path, num_replicas: int, pools: Mapping[str, Any]) -> list[pd.Series] | None:
    """Returns the watts of each replica's GPUs between two readings, by the time of the first; None without energy.csv."""
    if not (folder / ENERGY).is_file():
        return None
    table = pd.read_csv(folder / ENERGY, index_col="time")
    table = table.iloc[:: ceil(len(table) / _MOST_STEPS)]
    watts = table.diff().div(table.index.to_series().diff(), axis=0).shift(-1).dropna()
    replicas = [pool for pool in pools.values() for _ in range(pool["replicas"])]
    gpus = [pool["tensor_parallel"] * pool["pipeline_stages"] for pool in replicas]
    ends = np.cumsum(gpus or [table.shape[1] // num_replicas] * num_replicas)
    return [watts.iloc[:, first:end].sum(axis=1) for first, end in pairwise([0, *ends])]


def _predicted(steps: pd.DataFrame, stated: Mapping[str, Any], replica: int, whole: pd.DataFrame) -> "pd.Series[float]":
    """Returns the watts of a replica's GPUs by time, idle between iterations; long runs as means over equal times. stated: see `machines_of`.

    Iterations of the same window (`windows_of`) have its mean power, which is within the power limit.

    whole: iterations from whose first to whose last the replica exists.
    """
    if whole.empty:
        return pd.Series(dtype=float)
    machines, columns = machines_of(stated), {str(name): values.to_numpy() for name, values in steps.items()}
    assert machines.watts is not None
    of_one = np.zeros(len(steps), np.int64)
    seconds = device_seconds(columns, of_one)
    ended = np.maximum.accumulate(columns["ended"])
    begun = np.maximum(columns["started"], np.concatenate([[-np.inf], ended[:-1]]))
    times = np.array([whole["started"].min(), *np.column_stack([begun, ended]).flat, whole["ended"].max()])
    joules = machines.watts[replica, 0] * np.diff(times)
    own, window = machines.joules(columns, seconds, machines.watts[replica], of_one)[0], windows_of(seconds, of_one)
    means = np.bincount(window, own) / np.maximum(np.bincount(window, seconds), np.finfo(float).tiny)
    joules[1::2] = means[window] * seconds
    taken, edges = np.concatenate([[0.0], joules.cumsum()]), np.unique(times)
    if len(edges) > 2 * _MOST_STEPS:
        edges = np.linspace(times[0], times[-1], _MOST_STEPS)
    watts = np.diff(np.interp(edges, times, taken)) / np.diff(edges)
    return pd.Series([*watts, *watts[-1:]], edges)  # the last value holds up to the end


def _with_shares(steps: pd.DataFrame, stated: Mapping[str, Any] | None, replica: int) -> pd.DataFrame:
    """Adds the seconds of each iteration, and as `mfu` and `mbu` those that a GPU at its peak would need. stated: see `machines_of`."""
    if stated is None:
        return steps
    machines, columns = machines_of(stated), {str(name): values.to_numpy() for name, values in steps.items()}
    seconds = device_seconds(columns, np.zeros(len(steps), np.int64))
    return steps.assign(
        device_seconds=seconds,
        mfu=machines.flops(columns) / machines.flops_per_second[replica],
        mbu=machines.bytes(columns) / machines.bytes_per_second[replica],
    )


def _draw_prompts(panel: Axes, requests: pd.DataFrame, end: float) -> None:
    """Draws the shares of prompt tokens for the requests admitted in each interval of time up to `end`."""
    admitted = requests.dropna(subset="admitted")
    edges = np.linspace(0, end, min(_MOST_PARTS, max(len(admitted) // 10, 1)) + 1)
    found, again = admitted["cached_tokens"], admitted["recomputed_tokens"]
    kinds = {"found": found, "computed": admitted["prompt_tokens"] - found, "recomputed": again}
    kinds = {name: tokens for name, tokens in kinds.items() if tokens.any()}
    if not kinds:  # no request was admitted there
        return
    sums = np.array([np.histogram(admitted["admitted"], edges, weights=tokens)[0] for tokens in kinds.values()])
    shares = np.pad(100 * sums / np.maximum(sums.sum(axis=0), 1), ((0, 0), (0, 1)), mode="edge")
    colours = [_PARTS[name] for name in kinds]
    panel.stackplot(edges, *shares, step="post", labels=list(kinds), colors=colours, linewidth=0)


def _thin_out(steps: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Returns the iterations, or means over successive iterations if there are too many, and a description. Pauses are rows of zeros."""
    drawn, how = steps.select_dtypes("number"), "each iteration"
    longest = max((steps["ended"] - steps["started"]).max(), steps["ended"].max() / _MOST_STEPS)
    before_pause = steps["started"].shift(-1) - steps["ended"] > longest
    pauses = drawn[before_pause].mul(0).assign(started=steps.loc[before_pause, "ended"])
    if len(steps) > _MOST_STEPS:
        size = ceil(3 * len(steps) / _MOST_STEPS)
        between = before_pause.cumsum().shift(fill_value=0)
        number = between.map(between.value_counts())  # a single one left over would be high, and too narrow to be seen
        groups = drawn.groupby([between, between.groupby(between).cumcount() * -(-number // size) // number])
        drawn, how = groups.mean().assign(started=groups["started"].first()), f"each bar: up to {size} iterations"
    return pd.concat([drawn, pauses]).sort_values("started", kind="stable"), how
