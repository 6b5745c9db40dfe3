"""Draws figures of a sweep's runs against a swept setting, with a line or bars for each policy and each other setting that varies.

Named plots are curves from serving papers: latency against rate (vLLM, Sarathi-Serve), attainment of objectives against rate
(QoServe), and throughput, with its gain over a baseline policy, against P:D (SARATHI, Fig 9).
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import product
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field

from cbatch import ConfigError
from cbatch.validation import Give
from experiments.plots import series
from experiments.plots.axes import AXES, FUTURE, Axis, axis_of, check_swept, with_names
from experiments.plots.parts import PlainNumbers, draw_bars, label_log, name_places, wrap
from experiments.plots.style import PLAIN, Look, add_title, line_style, new_figure, print_style
from experiments.report.headings import Heading, check_figure, heading_of
from experiments.report.intervals import few_text
from experiments.report.labels import is_baseline, merge_equal
from experiments.report.notes import tail_text
from experiments.report.text import figures_text
from experiments.store.runs import matching, price_text, read_runs

Share = Annotated[float, Field(gt=0, le=1), Give("a share above 0, at most 1")]

USUAL_BASELINE = "request_level"
_MOST_ACROSS = 3  # panels side by side on a page
_MOST_TICKS = 6  # values of a setting that are the ticks of its axis, if they lie apart
_MOST_BANDS = 3  # lines with bands in a panel; beyond, bands merge, and intervals are error bars
_WIDEST = 5.0  # points from the middle of an error bar to the end of its cap, of the first line; later lines, drawn above it, have narrower caps
_GREY: dict[str, Any] = {"color": "#555555", "linewidth": 0.5, "zorder": 1}


def latency_vs_rate(folder: Path, look: Look = PLAIN, percentiles: tuple[int, ...] = (50, 99)) -> Figure:
    """Draws percentiles of the time to first token and the time between tokens against the measured rate of arrivals.

    Args:
        percentiles: of 50, 90, 95 and 99.
    """
    keys = tuple(f"{kind}_seconds.p{rank}" for rank in percentiles for kind in ("ttft", "tbt"))
    return draw(folder, look, x="rate", y=keys)


def attainment(folder: Path, look: Look = PLAIN, goal: Share = 0.9) -> Figure:
    """Draws the share of requests that attain all of their objectives, overall and per tier, against the measured rate of arrivals.

    If requests have no objectives, `metrics.objectives` apply.

    Args:
        goal: the share that a thin line marks.
    """
    runs, sources = read_runs(folder), (("attainment.share", "attainment.tiers.*.share"), ("goodput.attained_share",))
    if not (keys := next((keys for keys in sources if matching(keys, runs)), None)):
        remedy = "run it again with 'workload.slo={ttft: 1, tbt: 0.1}'"
        raise ConfigError(f"{folder}: no request has objectives; {remedy}")
    return draw(folder, look, x="rate", y=keys, goal=100 * goal)


def throughput_vs_pd(folder: Path, look: Look = PLAIN, baseline: str = USUAL_BASELINE) -> Figure:
    """Draws throughput and its gain over a baseline policy against the ratio of prefill to decode tokens.

    Args:
        baseline: the policy that gains are relative to; without a run of it, only throughput is shown.
    """
    return draw(folder, look, x="pd", y=("throughput.total_tokens_per_second",), baseline=baseline)


@print_style()
def draw(
    folder: Path, look: Look = PLAIN, *, x: str, y: tuple[str, ...], baseline: str = "", goal: float = 0.0
) -> Figure:
    """Draws a panel for each figure and workload, with a line for each policy and each other setting that varies.

    With several seeds, the line is the mean, and a band its 95% interval, as in tables; with more than three lines error bars with
    caps of different widths, since bands merge. The interval of a ratio is that of `experiments.compare`; runs that cannot be paired by seed have none. If a figure
    from a pattern is equal in all runs, it is printed below instead. An axis of values over a factor of eight in growing steps, such
    as 4, 32 and 128, is logarithmic. Equal lines are drawn once, as `first = second`. A policy or run without the setting x is drawn as a level
    line without markers, an eviction that reads the future as a grey, dashed line. If the values of x are names, bars are drawn.

    Raises ConfigError for no finished runs, fewer than two values of x, too many series, or an unknown figure or baseline.

    Args:
        x: the key of the setting on the x axis; or rate, the measured arrivals per second; pd, the P:D ratio; kv, the KV cache's size.
        y: figures of summary.json by key or pattern, as in ttft_seconds.p99,attainment.tiers.*.share.
        baseline: a policy; adds a panel for the ratio of each figure to the policy's figure.
        goal: the share in percent that a thin line marks.
    """
    axis, y = AXES.get(x) or axis_of(x), tuple(f"{key}.run" if key in ("mfu", "mbu") else key for key in y)
    frame = series.load_series(folder, look, (*axis.keys, "workload"))
    check_swept(frame, folder, x, axis)
    if x == "policy":
        if baseline:
            raise ConfigError(f"baseline={baseline}: x=policy compares policies; leave one of them out")
        frame = series.without_policies(frame, look)
    axis = with_names(axis, frame, look.labels)
    if axis.categories and look.xscale == "log":
        raise ConfigError(f"xscale=log: the values of {x} are names; leave it out")
    series.check_few(frame)
    keys = _figures(y, frame, folder)
    frame = series.leave_out(series.place(frame, x, axis), (x, keys[0]))
    if look.xscale == "log" and frame[x].min() <= 0:
        problem = f"{x} is {frame[x].min():g} in some runs, which a logarithmic axis lacks"
        raise ConfigError(f"xscale=log: {problem}; leave it out")
    grows = not axis.categories and x not in AXES and _grows(np.unique(frame[x].astype(float)))
    axis = axis._replace(log=look.xscale == "log" if look.xscale else axis.log or grows)
    equal = [key for key in keys if key not in y and frame[key].nunique(dropna=False) == 1]
    if baseline == USUAL_BASELINE and baseline not in set(frame["policy"]):
        print(f"no gain is drawn: there is no run of {baseline}; give another baseline=POLICY", file=sys.stderr)
        baseline = ""
    frame, shown, styles, bases = _lines(frame, ["of", x, *keys], baseline, keep_order=bool(look.order))
    unread = frame.loc[frame["level"], "label"].unique().tolist()
    cells = list(product(frame["of"].unique(), [key for key in keys if key not in equal], ("", *bases)))
    figure, panels = _panels([of for of, _, _ in cells], 2 if bases else _MOST_ACROSS)
    of_workload, drawn, wide = dict(iter(frame.groupby("of"))), list[pd.DataFrame](), set[str]()
    for of, key, over in cells:
        runs = of_workload[of]
        drawn.append(points := series.ratios_of(runs, x, key, over) if over else series.points_of(runs, x, key))
        if heading_of(key).kind == "log" and not over and points["mean"].max() > 3 * points["mean"].min():
            wide.add(key.partition(".")[0])
    for panel, points, (of, key, over) in zip(panels, drawn, cells, strict=True):
        if points.empty:  # for example ratios to 0 preemptions
            panel.set_axis_off()
            continue
        _draw_panel(panel, points, styles, unread, heading_of(key), over, bool(axis.categories))
        is_log = key.partition(".")[0] in wide and not axis.categories
        _finish_panel(panel, axis, points, "log" if is_log else heading_of(key).kind.replace("log", ""), goal, over)
        panel.set_title(of if frame["of"].nunique() > 1 else "")
    handles = next(filter(None, (panel.get_legend_handles_labels()[0] for panel in panels)), [])
    below = _notes(frame, x, keys, equal, unread)
    judged = any(key.startswith(("attainment.", "goodput.")) for key in keys)
    note = [series.describe_objectives(shown) * judged, series.describe_points(frame, x)]
    add_title(figure, shown, frame["heading"].iloc[0], handles, "; ".join(filter(None, note)), below, look)
    return figure


def _figures(y: Sequence[str], runs: pd.DataFrame, folder: Path) -> list[str]:
    """Returns the figures of the runs by keys or patterns. Raises ConfigError for an unknown one, or if no run has any."""
    for key in y:
        if not matching([key], runs) and "*" not in key:
            check_figure(f"figure={key}")
    if not (keys := matching(y, runs)):
        raise ConfigError(f"{folder}: no run has {' or '.join(y)}; docs/metrics.md says which runs have which figures")
    return keys


def _lines(
    runs: pd.DataFrame, columns: Sequence[str], baseline: str, keep_order: bool
) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, int], list[str]]:
    """Merges lines that are equal in all columns. Unless `keep_order`, the baseline comes first.

    Returns the runs of the lines, a row for each run, the style of each label, and the label of the baseline's line, if there is one.
    """
    is_base = is_baseline(runs, baseline) if baseline else runs["label"].isna()
    usual = merge_equal(runs, columns)["label"].unique()  # with any baseline, lines keep their colours
    places = {frozenset(label.split(" = ")): place for place, label in enumerate(usual)}
    runs = (runs if keep_order else pd.concat([runs[is_base], runs[~is_base]])).copy()  # pieces fragment it
    base, merged = set(runs.loc[is_base, "label"].head(1)), merge_equal(runs, columns)
    styles = {label: places[frozenset(label.split(" = "))] for label in merged["label"].unique()}
    bases = [label for label in styles if base & {*label.split(" = ")}]
    return merged, runs.drop_duplicates("folder"), styles, bases


def _grows(values: "np.ndarray[Any, np.dtype[np.float64]]") -> bool:
    """Returns whether ascending values span a factor of eight or more, each step being larger than the one before: 4, 32, 128."""
    return len(values) > 2 and 0 < 8 * values[0] <= values[-1] and bool((np.diff(values, 2) > 0).all())


def _panels(workloads: Sequence[str], most_across: int) -> tuple[Figure, list[Axes]]:
    """Returns a figure with a panel for each entry, and the panels of a workload side by side."""
    alike = workloads.count(workloads[0])
    together = alike if alike > 1 else len(workloads)
    across = ceil(together / ceil(together / most_across))
    rows = ceil(len(workloads) / across)
    figure, grid = new_figure(rows, across, 1.4 + 1.8 * rows)
    panels = [panel for row in grid for panel in row]
    for spare in panels[len(workloads) :]:
        spare.set_axis_off()
    return figure, panels[: len(workloads)]


def _draw_panel(
    panel: Axes,
    points: pd.DataFrame,
    labels: Mapping[str, int],
    unread: Sequence[str],
    heading: Heading,
    over: str,
    bars: bool,
) -> None:
    """Draws a line for each label, with a band or error bars for its intervals; or bars, the labels side by side at each x.

    labels: in the legend's order, with the numbers of their styles. unread: labels of policies that do not read x, which are lines always. over: label in the denominator of ratios; empty for means.
    """
    beside = points[~points["label"].isin(unread)]
    if over:
        panel.axhline(1.0, **_GREY)
    for place, (label, index) in enumerate(labels.items()):
        line, style = points[points["label"] == label], line_style(index)
        style |= {"color": "#777777", "linestyle": "--"} if label.endswith(FUTURE) else {}
        style |= {"marker": "", "linestyle": "--"} if label in unread else {}
        if bars and label not in unread:
            draw_bars(panel, line, beside, label, style)
            continue
        panel.plot(line["x"], line["mean"], label=label, **style)
        if len(labels) > _MOST_BANDS and (points["low"] < points["high"]).any():
            ends = [line["mean"] - line["low"], line["high"] - line["mean"]]
            caps: dict[str, Any] = {"elinewidth": 0.8, "capthick": 0.8, "capsize": _WIDEST - 3 * place / len(labels)}
            panel.errorbar(line["x"], line["mean"], ends, fmt="none", ecolor=style["color"], **caps)
        elif (line["low"] < line["high"]).any():
            panel.fill_between(line["x"], line["low"], line["high"], color=style["color"], alpha=0.2, linewidth=0)
    name = heading.on_axis
    panel.set_ylabel(wrap(f"{name.partition(' [')[0]} over {over.partition(' = ')[0]}" if over else name, 30))


def _finish_panel(panel: Axes, axis: Axis, points: pd.DataFrame, kind: str, goal: float, over: str) -> None:
    """Scales the axes. kind: a logarithmic axis, a share that ends at 100%, or another figure, whose axis begins at 0.

    A logarithmic axis spans a factor of three or more, and begins at a third of the smallest mean, where bands that reach to 0 or below are cut.
    """
    if kind == "log":
        panel.set_yscale("log")
        low, high = panel.get_ylim()
        low = max(low, points.loc[points["mean"] > 0, "mean"].min() / 3)
        panel.set_ylim(min(low, (low * high / 3) ** 0.5), max(high, (low * high * 3) ** 0.5))
        label_log(panel.yaxis, least_factor=1.0)  # as the other panels of this figure's kind
    elif kind == "share" and not over:
        panel.set_ylim(0, 100)
        if goal:
            panel.axhline(goal, label=f"goal: {goal:g}%", **_GREY)
    if not over and kind != "share" and panel.get_yscale() == "linear":
        panel.set_ylim(0, max(1.05 * panel.dataLim.y1, 0) or 1)
        panel.yaxis.set_major_formatter(PlainNumbers())
    panel.set_xlabel(axis.text)
    values = np.unique(points["x"])
    is_setting = axis.keys != AXES["rate"].keys  # not a measured rate
    if axis.log:
        panel.set_xscale("log")
        label_log(panel.xaxis, values.tolist() if is_setting else ())
        return
    if axis.categories:
        name_places(panel, [*axis.categories.values()])
        return
    panel.locator_params("x", steps=[1, 2, 5, 10], min_n_ticks=4)
    apart = np.diff(values).min(initial=np.inf) > np.ptp(values) / (2 * _MOST_TICKS)
    if len(values) <= _MOST_TICKS and apart and is_setting:
        panel.set_xticks(values, [f"{value:,g}" for value in values])
    if panel.dataLim.x0 > 0 and panel.dataLim.x1 > 3 * panel.dataLim.x0:
        panel.set_xlim(left=0)


def _notes(frame: pd.DataFrame, x: str, keys: Sequence[str], equal: Sequence[str], unread: Sequence[str]) -> str:
    """Returns notes on policies that do not read x, on figures that are equal in all runs, and on too few runs or requests."""
    notes = [f"{', '.join(unread)}: independent of {x}, drawn as a level line"] if unread else []
    values = [(heading_of(key), frame[key].iloc[0]) for key in equal]
    notes.append("; ".join(f"{of.text}: {of.factor * value:g} in each run" for of, value in values))
    notes.append(price_text(frame, keys))
    points = frame.assign(figures=frame["summary"].map(figures_text)).groupby(["label", x, "of"])
    notes.append(few_text(points["figures"].nunique(), advise=False))
    if any(key.endswith("p99") for key in keys):
        notes.append(tail_text(points["run.counted_requests"].agg(list), advise=False))
    return "\n".join(filter(None, notes))
