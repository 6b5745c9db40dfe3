"""Defines the style of all plots: page size, series that also differ in grey, headings, and notes on the origin of times."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import ceil
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal

import matplotlib
import pandas as pd

if "MPLBACKEND" not in os.environ:  # set by notebooks, which show figures
    matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from pydantic import BeforeValidator, Field

from cbatch import ConfigError
from cbatch.validation import Give
from experiments.plots.parts import LEAST_POINTS, LOG, FittedLayout, label_log, letters_across, show_whole_markers, wrap
from experiments.report.conditions import is_stated_overload
from experiments.report.headings import OFFERED
from experiments.report.labels import label_runs, with_given
from experiments.report.notes import chosen_text, footer_of, given_text, made_text, notes_of
from experiments.report.titles import gpus_texts

PAGE = 7.0  # inches: text width of a printed page
_SHARED = {
    "model": "{}",
    "workload": "{}",
    "workload.length": "length {}",
    "limits.batch": "batches of at most {}",
    OFFERED: "{} requests/s",
    "workload.speed": "speed {}",
    "workload.rate_scale": "rate scale {}",
    "workload.pd_ratio": "P:D {}",
    "kv_tokens": "KV cache of {} tokens",
    "eviction": "eviction {}",
    "drafter": "drafter {}",
    "drafter.max_drafts": "at most {} drafts",
}
"""Settings in a heading if all runs share them, and the text around their values."""
_USUAL = {"workload.speed": 1, "workload.rate_scale": 1, "drafter": "none"}  # not in the heading
_LEGEND_WIDTH, _LABEL_WIDTH, _NOTE_WIDTH = 125, 140, 145  # characters in a line as wide as a page

PREFILL, DECODE, PADDING, HOST, IDLE = "#0072B2", "#E69F00", "#BBBBBB", "#444444", "#F2F2F2"
"""Fill colours, which also differ in lightness."""

_SERIES = matplotlib.rc_params_from_file(Path(__file__).with_name("series.mplstyle"), use_default_template=False)
_STYLES: list[dict[str, Any]] = list(_SERIES["axes.prop_cycle"])
MOST_SERIES = len(_STYLES)
_MOST_LEGEND = 0.4

print_style = partial(plt.style.context, Path(__file__).with_name("print.mplstyle"))
"""Applies the settings of print.mplstyle inside the `with`. Also a decorator."""


def _read_labels(text: str) -> dict[str, str]:
    labels = dict(part.rpartition("=")[::2] for part in text.split(";") if part)
    if "" in labels:
        raise ValueError
    return labels


Inches = Annotated[float, Field(gt=0)]
Labels = Annotated[Mapping[str, str], BeforeValidator(_read_labels), Give("LABEL=TEXT;LABEL=TEXT")]
Order = Annotated[tuple[str, ...], BeforeValidator(lambda text: tuple(filter(None, text.split(";"))))]
_Numbers = BeforeValidator(lambda text: tuple(map(float, text.split(","))))
Size = Annotated[tuple[Inches, Inches], _Numbers, Give("width and height in inches, as in size=3.5,2.5")]
Limits = Annotated[tuple[float, float], _Numbers, Give("the ends of the axis, as in ylim=0,2.5")]
Scale = Literal["linear", "log"]


@dataclass(frozen=True)
class Look:
    """The style of a plot, and the choice of its runs.

    Args:
        labels: texts that replace labels or parts of labels, LABEL=TEXT;LABEL=TEXT.
        order: the labels that come first, LABEL;LABEL.
        size: width,height of the whole figure in inches.
        xlim, ylim: the ends of the axes of every panel, LOW,HIGH.
        xscale, yscale: linear or log, of every panel.
        title: the text above the plot; an empty one for none.
        notes: whether the origin of the figures stands below the plot; if not, it is printed.
        format: of the files, such as pdf,png,svg.
        runs: only runs whose folder names contain this.
        output: path of the files instead of FOLDER/plots/NAME; its ending, such as .pdf, is the format; an earlier file is
            replaced. In a folder (output=paper/), the name begins with that of FOLDER.
    """

    labels: Labels = field(default_factory=dict)
    order: Order = ()
    size: Size | None = None
    xlim: Limits | None = None
    ylim: Limits | None = None
    xscale: Scale | None = None
    yscale: Scale | None = None
    title: str | None = None
    notes: bool = True
    format: tuple[str, ...] = ("pdf", "png")
    runs: str = ""
    output: str = ""


PLAIN = Look()


def line_style(index: int) -> dict[str, Any]:
    """Returns colour, marker and dashes of a series. The first sixteen series differ; later series repeat them."""
    return {"linewidth": 1.2, **_STYLES[index % MOST_SERIES]}


def visible(label: str) -> str:
    """Returns a label that legends show, since matplotlib hides labels that begin with "_"."""
    return f" {label}" if label.startswith("_") else label


def new_figure(
    rows: int, columns: int, height: float, *, ratios: Sequence[float] | None = None, **shared: bool | str
) -> tuple[Figure, list[list[Axes]]]:
    """Returns a figure as wide as a page, `height` inches, and its axes, [rows][columns]. ratios: heights of the rows. shared: sharex, sharey."""
    options: dict[str, Any] = {"height_ratios": ratios, "layout": "constrained", **shared}
    figure, axes = plt.subplots(rows, columns, figsize=(PAGE, height), squeeze=False, **options)
    return figure, axes.tolist()


def add_title(
    figure: Figure,
    runs: pd.DataFrame,
    heading: str = "",
    handles: Sequence[Artist] = (),
    note: str = "",
    below: str = "",
    look: Look = PLAIN,
) -> None:
    """Adds a heading with the settings that all runs share and the legend's handles, and notes below the figure.

    All notes on the runs become the figure's label, which `save` writes into the file.

    note: end of the heading. below: notes on the figure, one line each.
    """
    shared = _shared_texts(runs)
    text = ": ".join(filter(None, [heading, ", ".join(shared)])) + (f" ({note})" if note else "")
    abouts = [summary["about"] for summary in runs["summary"]]
    chosen = "\n".join(filter(None, [given_text(abouts, _SHARED), chosen_text(abouts)]))
    below = "\n".join(filter(None, [_overload_text(runs), below]))
    notes = "\n".join(filter(None, [*notes_of(abouts), made_text(abouts), below, chosen]))
    figure.set_label(notes)
    if not look.notes:
        print(notes)  # for a caption
    for panel, axis in product(figure.axes, "xy"):
        _scale(panel, axis, getattr(look, f"{axis}scale"), getattr(look, f"{axis}lim"))
    for panel in figure.axes:
        show_whole_markers(panel)
    footer = [*footer_of(abouts, below.splitlines()), *chosen.splitlines()] if look.notes else []
    add_heading(figure, text if look.title is None else look.title, footer, handles, look.size)


def _scale(panel: Axes, name: str, scale: Scale | None, limits: Limits | None) -> None:
    """Gives an axis, x or y, the user's scale and limits. Raises ConfigError for a logarithmic one that shall hold 0."""
    axis: Axis = getattr(panel, f"{name}axis")
    kept = axis.get_scale() == scale and isinstance(axis.get_major_locator(), FixedLocator)  # swept values
    if scale and not kept:
        panel.set(**{f"{name}scale": scale, f"{name}label": axis.get_label_text().removesuffix(LOG)})
        if scale == "log" and min(axis.get_view_interval()) <= 0:
            panel.autoscale(axis=name)  # type: ignore[arg-type]
    if limits and axis.get_scale() == "log" and min(limits) <= 0:
        ends = ",".join(f"{end:g}" for end in limits)
        raise ConfigError(f"{name}lim={ends}: a logarithmic axis has no 0; give ends above it, or {name}scale=linear")
    if limits:
        panel.set(**{f"{name}lim": limits})
    if scale == "log" and not kept:
        label_log(axis, least_factor=1.0)


def seeds_of(runs: pd.DataFrame) -> pd.Series:
    """Returns the seeds of the runs' workloads."""
    return runs.get("workload.seed", pd.Series(0, runs.index))


def _shared_texts(runs: pd.DataFrame) -> list[str]:
    """Returns the settings that all runs share: settings in `_SHARED`, several GPUs, and settings by which the runs were chosen."""
    if OFFERED in runs and runs.groupby(seeds_of(runs), dropna=False)[OFFERED].nunique().max() == 1:
        runs = runs.assign(**{OFFERED: float(f"{runs[OFFERED].mean():.3g}")})
    if not runs.get("prefix_cache.evicted_blocks", pd.Series(1)).any():
        runs = runs.drop(columns="eviction", errors="ignore")  # it had nothing to choose
    known = runs[[key for key in map(str, runs) if key in _SHARED or key.startswith(("backend.", "autoscale"))]]
    shared = known.loc[:, known.notna().all() & (known.nunique() == 1)]
    values = {str(key): column.iloc[0] for key, column in shared.items()}
    if "autoscale" in known and known["autoscale"].notna().all():
        values.setdefault("autoscale", "")
    named = {key: words for key, words in _SHARED.items() if key in values and values[key] != _USUAL.get(key)}
    values |= {key: f"{value:,.10g}" for key, value in values.items() if isinstance(value, Real)}
    values |= {"workload": re.sub(r"^closed\b", "closed batch", values.get("workload", ""))}
    texts = [words.format(values[key]) for key, words in named.items()]
    chosen = runs["chosen"].iloc[0] if "chosen" in runs else {}
    stated = (*_SHARED, "batch", *("workload.arrivals.rate", "workload.rate") * (OFFERED in named))
    others = [text for key, text in chosen.items() if key not in stated and not key.startswith("backend.")]
    pools = [summary["about"].get("pools") for summary in runs["summary"]] if "summary" in runs else [None]
    return [*texts, *gpus_texts(values, pools[0] if pools.count(pools[0]) == len(pools) else None), *others]


def _overload_text(runs: pd.DataFrame) -> str:
    """Names the points with overload in some of their runs, by series; empty if all runs have it, or none."""
    abouts, points = [summary["about"] for summary in runs["summary"]], dict[str, list[str]]()
    over = [*map(is_stated_overload, abouts)]
    if len({*over}) < 2:
        return ""
    runs = runs.assign(policy=[about["policy"] for about in abouts])  # the column may be an axis
    whole = label_runs(runs.assign(policy=with_given(runs)))
    for label, rows in runs.assign(whole=whole, over=over).groupby("label", sort=False):
        parts = {text: [*filter(None, re.split(r", |[()]", text))] for text in rows["whole"].unique()}
        shared = set.intersection(*map(set, parts.values()))
        for text in rows["whole"][rows["over"]].unique():
            *before, last = [part for part in parts[text] if part not in shared] or [""]
            points.setdefault(", ".join(filter(None, [str(label), *before])), []).append(last)
    texts = list[str]()
    for name, (first, *others) in points.items():
        values = ", ".join([first, *(text.removeprefix(f"{first.partition('=')[0]}=") for text in others)])
        texts.append(" at ".join(filter(None, [name, values])))
    more = [f"{len(texts) - MOST_SERIES} other series"] * (len(texts) > MOST_SERIES)
    return f"overload: {' and '.join(texts[:MOST_SERIES] + more)}"


def add_heading(
    figure: Figure, heading: str, notes: Sequence[str], handles: Sequence[Artist], size: Size | None
) -> None:
    """Adds a heading with the legend's handles, and the notes below the figure.

    size: size of the figure; None: a legend of several rows, and notes of more than two lines, make the figure higher.
    """
    if size:
        figure.set_size_inches(size)
    pages = figure.get_figwidth() / PAGE
    width, parts = letters_across(figure, heading, 9), re.split(r"(?<=,) | (?=\()", heading)
    parts = [part.replace(" ", "\xa0") if len(part) < width // 2 else part for part in parts]
    heading = wrap(" ".join(parts), width).replace("\xa0", " ")  # breaks after commas and before parentheses
    footer = wrap("; ".join(notes), int(_NOTE_WIDTH * pages))
    if not size:
        figure.set_figheight(figure.get_figheight() + 0.1 * max(footer.count("\n") - 1, 0))
    for panel in figure.axes:
        panel.set_xlabel(wrap(panel.get_xlabel(), int(_LABEL_WIDTH * panel.bbox.width / figure.bbox.width * pages)))
        height = int(0.6 * _LABEL_WIDTH * panel.bbox.height / figure.bbox.width * pages)
        panel.set_ylabel(wrap(label := panel.get_ylabel(), max([height, *map(len, label.split())])))
    if handles:
        _add_legend(figure, heading, handles, size)
    else:
        figure.suptitle(heading, fontsize=9)
    figure.align_ylabels()
    figure.supxlabel(footer, fontsize=6, color="#555555", wrap=True)
    figure.set_layout_engine(FittedLayout(may_break=not size))


def _add_legend(figure: Figure, heading: str, handles: Sequence[Artist], size: Size | None) -> None:
    """Adds a legend below the heading, in smaller type if its entries would take more than `_MOST_LEGEND` of the figure's height.

    If they still do, the figure becomes higher. Raises ConfigError if its size is given.
    """
    height = figure.get_figheight()
    for points in (7, 6, LEAST_POINTS):
        width = int(_LEGEND_WIDTH * figure.get_figwidth() / PAGE * 7 / points)
        labels = [wrap(str(handle.get_label()), width - 8) for handle in handles]
        longest = max(len(line) for label in labels for line in label.splitlines())
        widest = min(len(handles), 4, max(width // (longest + 8), 1))
        ncols = ceil(len(handles) / ceil(len(handles) / widest))
        if not size:
            rows = ceil(len(handles) / ncols) + sum(label.count("\n") for label in labels)
            figure.set_figheight(height + 0.15 * (rows - 1))
        texts = {"title": heading, "title_fontsize": 9, "fontsize": points}
        legend = figure.legend(handles=handles, labels=labels, loc="outside upper center", ncols=ncols, **texts)
        legend.get_title().set_multialignment("center")
        entries = legend.get_window_extent().height - legend.get_title().get_window_extent().height
        if (share := entries / figure.bbox.height) <= _MOST_LEGEND:
            return
        if points > LEAST_POINTS:
            legend.remove()
    if size:
        problem = f"the legend takes {share:.0%} of the height"
        raise ConfigError(f"size={size[0]:g},{size[1]:g}: {problem}; give a larger one, or shorter labels=")
    figure.set_figheight(figure.get_figheight() * share / _MOST_LEGEND)
