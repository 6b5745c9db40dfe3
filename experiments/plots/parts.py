"""Building blocks of figures: logarithmic axes with plain numbers, lanes of activity, bars over names, broken texts."""

import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import inf, isinf
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, Formatter, LogLocator, NullFormatter, NullLocator, StrMethodFormatter

LOG = " (log)"  # the end of a label
LEAST_POINTS = 5  # of a text
_MOST_VALUES = 7  # labels on an axis
_WIDTH = 0.8  # of all bars at a name


class PlainNumbers(Formatter):
    """Labels the ticks of a linear axis with equally many decimals, and commas in thousands."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:,.10g}"

    def format_ticks(self, values: Iterable[float]) -> list[str]:
        texts = [self(value) for value in values]
        decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
        return [text if "e" in text else f"{value:,.{decimals}f}" for text, value in zip(texts, values, strict=True)]


class _Apart(StrMethodFormatter):
    """Labels the ticks of an axis, except those whose text would touch the previous one on a small panel."""

    def __init__(self, axis: Axis) -> None:
        super().__init__("{x:,.10g}")
        self._axis = axis

    def format_ticks(self, values: list[float]) -> list[str]:
        """Returns the texts of ticks; empty texts for omitted ticks."""
        texts, axes = super().format_ticks(values), self._axis.axes
        if not texts:
            return texts
        low, high = sorted(self._axis.get_view_interval())
        letter = 0.6 * rcParams["font.size"] * axes.figure.dpi / 72  # pixels
        upright = self._axis is axes.yaxis
        places = axes.transData.transform([(1, value) if upright else (value, 1) for value in values])[:, int(upright)]
        free = -inf
        for index in np.argsort(places):
            half = letter * (1.5 if upright else len(texts[index])) / 2
            if low <= values[index] <= high and free <= places[index] - half:
                free = places[index] + half + (0 if upright else letter)
            else:
                texts[index] = ""
        return texts


def label_log(axis: Axis, values: Sequence[float] = (), *, least_factor: float = 3.0) -> None:
    """Labels a drawn logarithmic axis with a few plain numbers for any span. Adds minor ticks and "(log)".

    The axis becomes linear if it spans less than `least_factor`, or has no positive value, such as gaps in outputs of one token.

    values: ascending values to label instead, unless they are too many or too close to each other.
    """
    least, most = axis.get_data_interval()
    if isinf(axis.get_minpos()) or most < least_factor * least:
        axis.axes.set(**{"xscale" if axis is axis.axes.xaxis else "yscale": "linear"})
        return
    low, high = sorted(axis.get_view_interval())
    if 2 <= len(values) <= _MOST_VALUES and all(two >= 1.25 * one for one, two in pairwise(values)):
        axis.set_major_locator(FixedLocator(values))
    else:
        # by the maximum ratio of the ends
        steps = {4: (1, 1.5, 2, 3, 4, 5, 6, 8), 8: (1, 1.5, 2, 3, 5, 7), 20: (1, 2, 3, 5), 100: (1, 2, 5)}
        others = (1, 3) if high < 1000 * low else (1,)
        axis.set_major_locator(LogLocator(subs=next((steps[most] for most in steps if high < most * low), others)))
    axis.set_major_formatter(_Apart(axis))
    exact = isinstance(axis.get_major_locator(), FixedLocator)
    axis.set_minor_locator(NullLocator() if exact else LogLocator(subs=range(2, 10), numticks=99))
    axis.set_minor_formatter(NullFormatter())
    axis.set_label_text(f"{axis.get_label_text()}{LOG}")


def lane_axes(panel: Axes, names: Sequence[str], begin: float, end: float) -> None:
    """Prepares a panel of lanes from `begin` to `end`. Lane i, called names[i], lies at y = i."""
    panel.set(xlim=(begin, end), ylim=(-0.6, len(names) - 0.4))
    panel.set_yticks(range(len(names) - 1, -1, -1), names[::-1])
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    panel.grid(visible=False)


def draw_spans(panel: Axes, lane: float, spans: Iterable[tuple[float, float]], **style: Any) -> None:
    """Draws the spans (begin, length) of a lane."""
    panel.broken_barh(list(spans), (lane - 0.4, 0.8), **({"linewidth": 0.4} | style))


def draw_bars(panel: Axes, points: pd.DataFrame, beside: pd.DataFrame, label: str, style: Mapping[str, Any]) -> None:
    """Draws the bars of a label, with their intervals.

    Args:
        points: the label's rows of `beside`, the points of all labels with bars; bars at the same x stand side by side.
        style: of the label's line; hollow markers become hatched bars.
    """
    at = beside.groupby("x")["label"]
    width = _WIDTH / at.size().max()
    places = points["x"] + (width * (at.cumcount() - (at.transform("size") - 1) / 2))[points.index]
    ends = [points["mean"] - points["low"], points["high"] - points["mean"]]
    fill = {"color": style["color"], "hatch": "" if style["fillstyle"] == "full" else "////", "edgecolor": "white"}
    error = {"elinewidth": 0.8, "ecolor": "#333333", "capsize": 2, "capthick": 0.8}
    panel.bar(places, points["mean"], width, yerr=ends, label=label, linewidth=0.5, error_kw=error, **fill)


def name_places(panel: Axes, names: Sequence[str]) -> None:
    """Labels the places 0, 1, ... on the x axis, on a slant if two lines of a name are too wide."""
    texts = [name.replace(" (", "(").replace("(", "\n(") for name in names]
    font, room = FontProperties(size=rcParams["xtick.labelsize"]), 72 * panel.bbox.width / panel.figure.dpi / len(names)
    lines = [TextPath((0, 0), line, prop=font, size=font.get_size()) for text in texts for line in text.splitlines()]
    slanted = max(line.get_extents().width for line in lines) > room
    panel.set_xticks(range(len(names)), names if slanted else texts)
    for text in panel.get_xticklabels() if slanted else ():
        text.set(rotation=30, rotation_mode="anchor", horizontalalignment="right")
    panel.set_xlim(-0.6, len(names) - 0.4)
    panel.xaxis.grid(visible=False)


def letters_across(figure: Figure, text: str, points: float) -> int:
    """Returns how many letters, as wide as those of a text are on average, a line across the figure holds beside its margins."""
    probe = figure.text(0, 0, text, fontsize=points)
    letters = max(len(text), 1) * figure.bbox.width / max(probe.get_window_extent().width, 1)
    probe.remove()
    return int(0.96 * letters)


def show_whole_markers(panel: Axes) -> None:
    """Draws markers at the ends of the axes whole, of lines that lie within the axes."""
    ends = np.sort([panel.get_xlim(), panel.get_ylim()])
    for line in panel.get_lines():
        points = np.ma.masked_invalid(line.get_xydata())
        if line.get_marker() != "None" and ((ends[:, 0] <= points) & (points <= ends[:, 1])).all():
            line.set_clip_on(False)


def wrap(text: str, width: int) -> str:
    """Breaks a text into lines of about equal length, as few as `width` characters allow."""
    broken = partial(fill, text, break_on_hyphens=False)
    longest = max(map(len, text.split(" ")), default=0)
    widths = range(min(longest, width) or 1, width + 1)  # fewer lines as they grow
    least = bisect_left(widths, -broken(width).count("\n"), key=lambda width: -broken(width).count("\n"))
    return broken(widths[least])


class FittedLayout(ConstrainedLayoutEngine):
    """Lays out a figure when it is drawn. The first time, it breaks labels on y longer than their panel, or sets them in smaller type."""

    def __init__(self, may_break: bool) -> None:
        """may_break: whether there is width for more lines, which a figure of a given size lacks."""
        super().__init__()
        self._may_break = may_break

    def execute(self, fig: Figure) -> None:
        fig.set_layout_engine("constrained")  # from now on
        with warnings.catch_warnings(action="ignore"):  # `save` refuses a figure without room
            super().execute(fig)
        for panel in fig.axes:
            label = panel.yaxis.label
            if (share := panel.bbox.height / max(label.get_window_extent().height, 1)) < 1:
                if self._may_break:
                    lines, words = label.get_text().splitlines(), label.get_text().split()
                    longest = max(map(len, words + [line[: int(share * len(line))] for line in lines]))
                    label.set_text(wrap(" ".join(words), longest))
                    share = panel.bbox.height / label.get_window_extent().height
                label.set_fontsize(max(float(label.get_fontsize()) * min(share, 1), LEAST_POINTS))
        super().execute(fig)
