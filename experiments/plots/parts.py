"""Building blocks of figures: facets, grouped and stacked bars, plain logarithmic axes, lanes of activity, legends."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from experiments.plots.series import Ends, summarize_series
from experiments.plots.style import fill_style, line_style, new_figure, paper_style
from experiments.store.intervals import linear_ends


class Facet(NamedTuple):
    """The panels of one value of a column, and its rows of the data."""

    name: str
    data: pd.DataFrame
    panels: list[Axes]


def facet(
    data: pd.DataFrame,
    num_panels: int,
    height: float,
    *,
    by: str = "hardware",
    extra: float = 0.0,
    across: bool = False,
    sharex: bool = False,
) -> tuple[Figure, list[Facet]]:
    """A figure with a row of `num_panels` panels for each value of a column, in order of appearance.

    Args:
        height: inches of one row; `extra`: inches beside the rows, for the legend.
        across: draw a column of panels for each value instead of a row; `height` is then the figure's.
    """
    groups = list(data.groupby(by, sort=False))
    rows, columns = (num_panels, len(groups)) if across else (len(groups), num_panels)
    figure, axes = new_figure(rows, columns, extra + height * (1 if across else rows), sharex=sharex)
    panels = [list(column) for column in zip(*axes, strict=True)] if across else axes
    return figure, [Facet(str(name), shown, own) for (name, shown), own in zip(groups, panels, strict=True)]


def grouped_bars(
    panel: Axes,
    table: pd.DataFrame,
    styles: Sequence[int] = (),
    *,
    width: float | None = None,
    labels: Sequence[str] = (),
    **values: Any,
) -> dict[Any, NDArray[np.float64]]:
    """Bars side by side around each tick: a group for each row of `table`, a bar for each column that has a value.

    Args:
        styles: of the columns, see `fill_style`; labels: their names in the legend.
        width: of a bar, with 1 between two ticks.
        values: options of `Axes.bar_label`; without them the values are not written above the bars.

    Returns:
        The x of each column's bars, [rows].
    """
    width = width or 0.8 / table.shape[1]
    present = table.notna().to_numpy()
    rank = present.cumsum(axis=1) - (present.sum(axis=1, keepdims=True) + 1) / 2
    places = np.arange(len(table))[:, None] + width * rank  # [rows, columns]
    for index, name in enumerate(table):
        here = present[:, index]
        label, style = labels[index] if labels else str(name), fill_style(styles[index] if styles else index)
        bars = panel.bar(places[here, index], table[name].to_numpy()[here], width, label=label, **style)
        if values:
            panel.bar_label(bars, **values)
    panel.set_xticks(range(len(table)), [str(name) for name in table.index])
    panel.xaxis.grid(visible=False)
    return dict(zip(table, places.T, strict=True))


def stacked_bars(panel: Axes, places: Iterable[float], table: pd.DataFrame, width: float = 0.8) -> pd.DataFrame:
    """Bars at `places`, one for each row of `table`, its columns stacked. Returns the middle of each part."""
    bottoms = table.cumsum(axis=1) - table
    for index, name in enumerate(table):
        panel.bar(list(places), table[name], width, bottom=bottoms[name], label=str(name), **fill_style(index))
    panel.xaxis.grid(visible=False)
    return bottoms + table / 2


def mark_printed(panel: Axes, points: Iterable[tuple[float, float]], **style: Any) -> None:
    """Mark the (x, y) that a source prints. style: what differs from `paper_style`."""
    if shown := list(points):
        panel.plot(*zip(*shown, strict=True), **(paper_style() | style))


def log_x(panel: Axes, ticks: Sequence[float] = (), base: float = 10.0) -> None:
    """A logarithmic x axis labelled with plain numbers, at `ticks` if any are given."""
    panel.set_xscale("log", base=base)
    if ticks:
        panel.set_xticks(ticks)
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())


def label_log(axis: Axis) -> None:
    """Label a logarithmic axis, after drawing, with about three to six plain numbers however few decades it spans."""
    low, high = sorted(axis.get_view_interval())
    if low <= 0:  # nothing was drawn
        return
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7)):
        if len(ticks) < 3:
            ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
    if len(ticks) < 3:
        ticks = [tick for tick in MaxNLocator(5, min_n_ticks=3).tick_values(low, high) if low <= tick <= high]
    axis.set_ticks(apart(ticks, (0.19 if isinstance(axis, XAxis) else 0.08) * math.log(high / low)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def apart(values: Iterable[float], gap: float) -> list[float]:
    """Those of the positive values, ascending, whose logarithms are at least `gap` from that of the last one kept."""
    kept: list[float] = []
    for value in sorted(values):
        if not kept or math.log(value / kept[-1]) >= gap:
            kept.append(value)
    return kept


def draw_series(panel: Axes, points: pd.DataFrame, x: str, label: str, index: int) -> None:
    """A line through the means and, where repeated runs differ, a band of their 95% interval.

    points: the rows of one label of `experiments.plots.series.summarize_series`.
    """
    points = points.dropna()
    style = line_style(index)
    panel.plot(points[x], points["mean"], label=label, **style)
    if (points["low"] < points["high"]).any():
        panel.fill_between(points[x], points["low"], points["high"], color=style["color"], alpha=0.2, linewidth=0)


def draw_rates(
    panel: Axes, data: pd.DataFrame, column: str, labels: Iterable[str], factor: float = 1.0, ends: Ends = linear_ends
) -> None:
    """A line for each label: column * factor against the request rate.

    data: rows of `series.load_rates`. ends: as in `series.summarize_series`.
    """
    points = summarize_series(data.assign(shown=data[column] * factor), "rate", "shown", ends)
    for index, label in enumerate(labels):
        draw_series(panel, points[points.index == label], "rate", label, index)
    low, high = data["rate"].min(), data["rate"].max()
    margin = 0.06 * high  # for whole markers
    panel.set_xlim(0 if low < high / 3 else low - margin, high + margin)


def lane_axes(panel: Axes, names: Sequence[str], begin: float, end: float) -> None:
    """Axes of lanes from `begin` to `end`: lane i, called names[i], lies at y = i."""
    panel.set(xlim=(begin, end), ylim=(-0.6, len(names) - 0.4))
    panel.set_yticks(range(len(names) - 1, -1, -1), names[::-1])
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    panel.grid(visible=False)


def draw_spans(panel: Axes, lane: float, spans: Iterable[tuple[float, float]], **style: Any) -> None:
    """Draw the (begin, length) of a lane."""
    panel.broken_barh(list(spans), (lane - 0.4, 0.8), **({"linewidth": 0.4} | style))


def legend(figure: Figure, panels: Iterable[Axes], ncols: int = 4, last: str = "", **options: Any) -> None:
    """One legend above the figure, each label of the panels once; the label that begins with `last` comes last."""
    entries: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    labels = sorted(entries, key=lambda label: bool(last) and label.startswith(last))
    handles = [entries[label] for label in labels]
    figure.legend(handles, labels, loc="outside upper center", ncols=ncols, **options)
