"""Building blocks of plots: labels of logarithmic axes, and styles that can be told apart."""

import warnings
from itertools import pairwise

import pytest

from experiments.plots import parts
from experiments.plots.style import line_style, new_figure


@pytest.mark.parametrize(("low", "high"), [(4.3, 5.1), (0.015, 0.036), (0.001, 300), (4.2, 9.3), (20, 41)])
def test_a_logarithmic_axis_has_a_few_labels_that_do_not_touch(low: float, high: float) -> None:
    figure, [panels] = new_figure(1, 3, 2.7)
    for panel in panels:
        panel.plot([low, high], [0, 1])
        panel.set_xscale("log")
        parts.label_log(panel.xaxis)
    figure.draw_without_rendering()
    ticks = [*panels[0].xaxis.get_major_ticks(), *panels[0].xaxis.get_minor_ticks()]
    left, right = sorted(panels[0].get_xlim())
    shown = [tick.label1 for tick in ticks if tick.label1.get_text() and left <= tick.get_loc() <= right]
    assert 3 <= len(shown) <= 7
    boxes = sorted((text.get_window_extent() for text in shown), key=lambda box: box.x0)
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


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
