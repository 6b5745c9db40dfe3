"""Draws a figure of a sweep's runs over two settings, as a heat map for each policy and each other setting that varies."""

from collections.abc import Mapping, Sequence
from math import ceil, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from cbatch import ConfigError
from experiments.plots.axes import axis_of, check_swept, with_names
from experiments.plots.parts import PlainNumbers, label_log
from experiments.plots.series import check_few, describe_points, leave_out, load_series, points_of, without_policies
from experiments.plots.style import PAGE, PLAIN, Look, add_title, new_figure, print_style
from experiments.report.headings import Heading, check_figure, heading_of
from experiments.report.labels import merge_equal
from experiments.report.notes import tail_text
from experiments.store.runs import price_text

_PANEL, _CELL = 2.2, 0.45  # inches: of a panel beside others, and of a cell with a number, at least


@print_style()
def draw(folder: Path, look: Look = PLAIN, *, x: str, y: str, value: str) -> Figure:
    """Draws a panel for each policy and each other setting that varies, with a cell for each x and y. All panels have one scale; equal ones are drawn once, as `first = second`.

    A cell is the mean over seeds. Numbers stand in the cells if there is room. Latencies over a wide range have a logarithmic scale.

    Raises ConfigError for no finished runs, a setting without two values, an unknown figure, or too many panels.

    Args:
        x, y: settings on the axes, by key.
        value: the figure of summary.json that the colours show, by key.
    """
    frame = load_series(folder, look, (x, y))
    for key in (x, y):
        check_swept(frame, folder, key, axis_of(key))
    frame = without_policies(frame, look) if "policy" in (x, y) else frame
    if value not in frame:
        check_figure(f"figure={value}")
        raise ConfigError(f"{folder}: no run has {value}; docs/metrics.md says which runs have which figures")
    check_few(frame)
    frame = leave_out(frame, (x, y, value))
    places = merge_equal(frame, [y, x, value])
    places = places.assign(place=places[[y, x]].apply(tuple, axis=1))
    points, heading = points_of(places, "place", value), heading_of(value)
    names = [_names(frame, key, look) for key in (x, y)]
    if with_names(axis_of(y), frame, look.labels).categories:
        names[1] = dict([*names[1].items()][::-1])  # the first name on top, as in tables
    figure = _draw_panels(points, names, heading, look.size[0] if look.size else PAGE)
    for panel in figure.axes[:-1]:
        panel.set(xlabel=axis_of(x).text, ylabel=axis_of(y).text)
        panel.label_outer()
    note, price = describe_points(places, "place", "mean"), price_text(frame, [value])
    tail = tail_text([frame["run.counted_requests"].tolist()], advise=False) if value.endswith("p99") else ""
    below = "\n".join(filter(None, [tail, price]))
    add_title(figure, frame, frame["heading"].iloc[0], note=note, below=below, look=look)
    return figure


def _draw_panels(points: pd.DataFrame, names: Sequence[Mapping[Any, str]], heading: Heading, width: float) -> Figure:
    """Returns a figure with a heat map for each label, and the bar of their colours as the last axes.

    points: with x as (y, x). names: the texts of the values on x, and on y. width: inches of the figure.
    """
    wide = heading.kind == "log" and points["mean"].max() > 3 * points["mean"].min() > 0
    norm = (LogNorm if wide else Normalize)(points["mean"].min(), points["mean"].max())
    labels = points["label"].unique()
    rows = ceil(len(labels) / max(int(width / _PANEL), 1))
    across = ceil(len(labels) / rows)
    figure, grid = new_figure(rows, across, 1.0 + 1.9 * rows, sharex=True, sharey=True)
    panels = [panel for row in grid for panel in row]
    for spare in panels[len(labels) :]:
        spare.remove()
    for panel, label in zip(panels, labels, strict=False):
        means = points[points["label"] == label].set_index("x")["mean"]
        cells = [[means.get((line, column), nan) for column in names[0]] for line in names[1]]
        _draw_cells(panel, np.array(cells, float), norm, _CELL * len(names[0]) * across <= width)
        panel.set_xticks(range(len(names[0])), [*names[0].values()])
        panel.set_yticks(range(len(names[1])), [*names[1].values()])
        panel.set_title(label)
    name, beside = heading.on_axis, panels[: len(labels)]
    bar = figure.colorbar(panels[0].images[0], ax=beside, label=name, aspect=15 * rows)
    bar.ax.yaxis.set_major_formatter(PlainNumbers())
    if wide:
        label_log(bar.ax.yaxis)
    return figure


def _names(runs: pd.DataFrame, key: str, look: Look) -> Mapping[Any, str]:
    """Returns the text of each value of a setting: numbers ascending, names in order of appearance."""
    if names := with_names(axis_of(key), runs, look.labels).categories:
        return names
    return {number: f"{number:,g}" for number in sorted(runs[key].unique())}


def _draw_cells(panel: Axes, cells: NDArray[np.float64], norm: Normalize, numbers: bool) -> None:
    """Draws a heat map. cells: means, [y, x]; NaN for no run."""
    image = panel.imshow(cells, norm=norm, cmap="cividis", origin="lower", aspect="auto")
    panel.grid(visible=False)
    greens = np.asarray(image.cmap(image.norm(cells)))[..., 1]  # bright where cividis is
    for (row, column), mean in np.ndenumerate(cells) if numbers else ():
        if not isnan(mean):
            text = f"{mean:,.3g}" if abs(mean) < 1000 else f"{mean:,.0f}"
            color = "black" if greens[row, column] > 0.45 else "white"
            panel.text(column, row, text, ha="center", va="center", color=color, size=6)
