"""Draws bars over names on the x axis."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties

_WIDTH = 0.8  # of all bars at a name


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
    """Labels the places 0, 1, ... on the x axis."""
    lines = [name.replace(" (", "(").replace("(", "\n(") for name in names]
    letter = 0.6 * FontProperties(size=rcParams["xtick.labelsize"]).get_size_in_points() / 72  # inches
    longest = max(len(line) for text in lines for line in text.splitlines())
    width = panel.bbox.width / panel.figure.dpi
    panel.set_xticks(range(len(names)), lines)
    if longest * letter > width / len(names):
        panel.tick_params(axis="x", labelrotation=30)
        plt.setp(panel.get_xticklabels(), ha="right")
    panel.set_xlim(-0.6, len(names) - 0.4)
    panel.xaxis.grid(visible=False)
