"""Building blocks of the figures of papers: facets, grouped and stacked bars, printed points, legends."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from experiments.plots.style import new_figure

_FILLS = (
    ("#0072B2", "", "white"),
    ("#E69F00", "////", "#7A5400"),
    ("#56B4E9", "", "white"),
    ("#DDDDDD", "", "#888888"),
    ("#444444", "", "white"),
)


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


def fill_style(index: int) -> dict[str, Any]:
    """Colour and hatching of an area; neighbours differ in lightness."""
    colour, hatch, edge = _FILLS[index % len(_FILLS)]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": edge, "linewidth": 0.3}


def paper_style() -> dict[str, Any]:
    """Values that a paper prints: hollow and black, on top of our own."""
    return {
        "label": "paper",
        "color": "black",
        "marker": "D",
        "markerfacecolor": "white",
        "markersize": 4.5,
        "markeredgewidth": 0.9,
        "linestyle": "none",
        "zorder": 5,
    }


def log_x(panel: Axes, ticks: Sequence[float] = (), base: float = 10.0) -> None:
    """A logarithmic x axis labelled with plain numbers, at `ticks` if any are given."""
    panel.set_xscale("log", base=base)
    if ticks:
        panel.set_xticks(ticks)
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, panels: Iterable[Axes], ncols: int = 4, last: str = "", **options: Any) -> None:
    """One legend above the figure, each label of the panels once; the label that begins with `last` comes last."""
    entries: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    labels = sorted(entries, key=lambda label: bool(last) and label.startswith(last))
    figure.legend([entries[label] for label in labels], labels, loc="outside upper center", ncols=ncols, **options)
