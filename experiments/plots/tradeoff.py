"""Draws one figure of runs against another, with the 95% intervals of both means, cut at 0 and 100%."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.path import Path as Outline
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

from cbatch import ConfigError
from experiments.plots.axes import axis_of
from experiments.plots.parts import PlainNumbers, label_log
from experiments.plots.series import check_few, describe_points, leave_out, load_series, points_of
from experiments.plots.style import PLAIN, Look, add_title, line_style, new_figure, print_style, seeds_of
from experiments.report.headings import OFFERED, check_figure, heading_of
from experiments.report.labels import is_seed, merge_equal, settings_of
from experiments.report.notes import tail_text
from experiments.store.runs import select_runs

_OBJECTS = ("autoscale.", "eviction.", "backend.router.")
"""Prefixes of the keys of other objects' arguments, which labels state."""
_ASIDE = [(right, above) for above in (-2, 2, -10, 10) for right in (4, -4)]
"""Points from a marker to the text beside it, the preferred place first."""


@print_style()
def draw(folder: Path, look: Look = PLAIN, x: str = "", y: str = "") -> Figure:
    """Draws a point for each label, such as the SLO share that an autoscaler attains against the replica-seconds that it pays.

    If policies and one number, such as a rate or a chunk, are swept, a line joins each label's points in the order of the number, which labels leave out, and the number stands beside both ends.
    If several numbers are swept, it is the only one beside the arguments of policies.
    Labels with equal points are drawn once, as `first = second`.

    Raises ConfigError if there are no runs that have both figures, or too many labels.

    Args:
        x, y: figures of summary.json. Without them: of autoscaled runs, the share that attains its objectives, or else the P99 of TTFT,
            against replica-seconds; of other runs, a P99 against throughput: of TBT if all requests are there from the start, else of
            TTFT; but if requests arrive at the same rate in all runs, the P99 of TTFT against that of TBT.
    """
    chosen = select_runs(folder, look.runs)[0]
    usual_x, usual_y = _usual(chosen)
    x, y = x or usual_x, y or usual_y
    check_figure(f"x={x}")
    check_figure(f"y={y}")
    along = _swept_number(chosen)
    runs = load_series(folder, look, [along] * bool(along))
    if absent := next((key for key in (x, y) if key not in runs), None):
        remedy = "give two that they have, such as x=throughput.total_tokens_per_second y=ttft_seconds.p99"
        raise ConfigError(f"{absent}: no run in {folder} has this figure; {remedy}")
    runs = leave_out(runs, [x, y])
    numbers = pd.to_numeric(runs[along]) if along else pd.Series(np.nan, runs.index)
    runs = runs.assign(at=numbers.fillna(0))  # one place for all runs of a label without this setting
    merged = merge_equal(runs, ["at", x, y])
    check_few(merged)
    figure, [[panel]] = new_figure(1, 1, 3.4)
    across, up = (dict(iter(points_of(merged, "at", key).groupby("label", sort=False))) for key in (x, y))
    for place, label in enumerate(across):
        points = across[label], up[label]
        xerr, yerr = (
            [at["mean"] - at["low"].clip(lower=0), at["high"] - at["mean"]]
            if (at["low"] < at["high"]).any()
            else None  # the legend shows bars where there are any
            for at in points
        )
        style = {**line_style(place), "label": label, "capsize": 2, "elinewidth": 0.8}
        style |= {"linestyle": ""} if len(points[0]) == 1 else {}
        means = points[0]["mean"], points[1]["mean"]
        panel.errorbar(means[0], means[1], xerr=xerr, yerr=yerr, **style)
    for axis, of_labels, key in zip("xy", (across, up), (x, y), strict=True):
        heading, shown = heading_of(key), pd.concat(of_labels.values())
        panel.set(**{f"{axis}label": heading.on_axis, f"{axis}lim": _ends(shown, heading.limits[1])})
        getattr(panel, f"{axis}axis").set_major_formatter(PlainNumbers())
        if heading.kind == "log" and 0 < 3 * shown["mean"].min() < shown["mean"].max():
            panel.set(**{f"{axis}scale": "log", f"{axis}lim": _log_ends(shown)})
            label_log(getattr(panel, f"{axis}axis"))
    handles, note = panel.get_legend_handles_labels()[0], describe_points(runs, "at")
    joined = [f"{value:g}" for value in sorted({*numbers.dropna()})]
    below = f"lines join {axis_of(along).text}: {', '.join(joined)}" if along else ""
    groups = runs["run.counted_requests"].groupby([runs["label"], runs["at"]])
    tail = tail_text(groups.agg(list), advise=False) if "p99" in x + y else ""
    add_title(figure, runs, runs["heading"].iloc[0], handles, note, "\n".join(filter(None, [below, tail])), look)
    _label_ends(panel, across, up, along.rpartition(".")[2])
    return figure


def _label_ends(panel: Axes, across: Mapping[Any, pd.DataFrame], up: Mapping[Any, pd.DataFrame], name: str) -> None:
    """Writes the swept number at both ends of each line, the first as `name=number`, where it covers no marker and no other number.

    If there is no such place, the number is left out. across, up: the points of each label.
    """
    means = {label: np.c_[points["mean"], up[label]["mean"]] for label, points in across.items()}
    taken = [Bbox([place, place]).padded(4) for place in panel.transData.transform(np.concatenate([*means.values()]))]
    paths = [Outline(panel.transData.transform(points)) for points in means.values()]
    head = f"{name}="
    for index, (label, points) in enumerate(across.items()):
        for end in (0, -1) if len(points) > 1 else ():
            for lines, (right, above) in product((paths, []), _ASIDE):  # across no line where there is such a place
                note = panel.annotate(
                    f"{head}{points['x'].iloc[end]:g}",
                    means[label][end],
                    (right, above),
                    textcoords="offset points",
                    ha="left" if right > 0 else "right",
                    va="bottom" if above > 0 else "top",
                    fontsize=6,
                    color=line_style(index)["color"],
                    path_effects=[withStroke(linewidth=1.5, foreground="white")],  # across lines
                )
                box = note.get_window_extent()
                crosses = any(line.intersects_bbox(box, filled=False) for line in lines)
                inside = all(panel.bbox.contains(*corner) for corner in box.get_points())
                if inside and not crosses and not box.count_overlaps(taken):
                    taken.append(box)
                    head = ""
                    break
                note.remove()


def _usual(runs: pd.DataFrame) -> tuple[str, str]:
    """Returns the figures that a plot without x= and y= shows, as `draw` explains."""
    attained = runs.get("goodput.attained_share", pd.Series(np.nan, runs.index))
    if "replicas.seconds" in runs:
        return "replicas.seconds", "goodput.attained_share" if attained.notna().any() else "ttft_seconds.p99"
    rates = runs.get(OFFERED, pd.Series(np.nan, runs.index))
    if rates.isna().all():
        return "throughput.total_tokens_per_second", "tbt_seconds.p99"
    same = rates.groupby(seeds_of(runs), dropna=False).nunique().max() == 1
    return "tbt_seconds.p99" if same else "throughput.total_tokens_per_second", "ttft_seconds.p99"


def _swept_number(runs: pd.DataFrame) -> str:
    """Returns the key of the only number that varies between runs of a policy, or an empty text. Seeds and arguments of other objects do not count.

    If several vary, it is the only one between runs of a policy with equal arguments.
    """
    texts = settings_of(runs).assign(chunk=runs.get("chunk"))
    found = _numbers_within(texts, runs["policy"].str.partition("(")[0])
    found = found if len(found) < 2 else _numbers_within(texts, runs["policy"])
    return found[0] if len(found) == 1 else ""


def _numbers_within(texts: pd.DataFrame, policies: "pd.Series[str]") -> list[str]:
    """Returns the keys of the numbers that vary between runs of a policy."""
    varying = [key for key in map(str, texts) if texts[key].groupby(policies).nunique().max() > 1]
    numbers = texts[varying].apply(pd.to_numeric, errors="coerce")
    found = [key for key in varying if numbers[key].notna().equals(texts[key].notna()) and not is_seed(key)]
    found = [key for key in found if not key.startswith(_OBJECTS)]
    if "chunk" in found:  # with the arguments that follow it
        others = numbers.ne(numbers["chunk"], axis=0) & numbers.notna()
        found = [key for key in found if key == "chunk" or others[key].any()]
    return found


def _ends(points: pd.DataFrame, top: float) -> tuple[float, float]:
    """Returns the ends of an axis: from 0, or around the points if all lie in its upper half. top: 100 for a share."""
    sides = points[["mean", "low", "high"]]
    least, highest = float(np.nanmin(sides)), float(np.nanmax(sides))
    begin = least if 2 * least > highest > least else 0.0
    room = 0.08 * (highest - begin)
    return max(begin - room, 0.0), min(highest + room, top) or 1.0


def _log_ends(points: pd.DataFrame) -> tuple[float, float]:
    """Returns the ends of a logarithmic axis, which cuts intervals at a third of the smallest mean."""
    low, high = points["low"].fillna(points["mean"]), points["high"].fillna(points["mean"])
    return max(float(low.min()), float(points["mean"].min()) / 3) / 1.1, 1.1 * float(high.max())
