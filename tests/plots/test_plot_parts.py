"""Building blocks of plots: labels of logarithmic axes, and styles that can be told apart."""

import warnings

import pytest

from experiments.plots import parts
from experiments.plots.style import line_style, new_figure


@pytest.mark.parametrize("values", [[], [0.0, 0.0]], ids=["nothing", "zeros"])
def test_an_axis_without_positive_values_can_be_drawn(values: list[float]) -> None:
    figure, [[panel]] = new_figure(1, 1, 2.7)
    panel.plot(values, values)
    with warnings.catch_warnings(action="ignore"):  # that there is none
        panel.set(xscale="log", yscale="log")
    parts.label_log(panel.xaxis)
    parts.label_log(panel.yaxis)
    figure.draw_without_rendering()


def test_sixteen_series_can_be_told_apart_without_colour() -> None:
    looks = {(style["marker"], style["fillstyle"]) for style in map(line_style, range(16))}
    assert len(looks) == len({line_style(index)["color"] for index in range(16)}) == 16
