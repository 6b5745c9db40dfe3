"""Building blocks of figures: where bars, spans, marks and words stand, from values given by hand."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from experiments.plots import parts
from experiments.plots.style import fill_style, line_style, new_figure


@pytest.fixture
def panel() -> Iterator[Axes]:
    yield new_figure(1, 1, 2.0)[1][0][0]
    plt.close("all")


def bars(panel: Axes) -> dict[str, list[tuple[float, float, float, float]]]:
    """x of the middle, bottom, width and height of each bar, by label."""
    return {
        str(group.get_label()): [
            (round(bar.get_x() + bar.get_width() / 2, 9), bar.get_y(), round(bar.get_width(), 9), bar.get_height())
            for bar in group
        ]
        for group in panel.containers
    }


def colors(panel: Axes) -> list[str]:
    return [to_hex(group[0].get_facecolor()) for group in panel.containers]


TABLE = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4.0, None, 6.0]}, index=["x", "y", "z"])


def test_bars_stand_side_by_side_around_their_tick(panel: Axes) -> None:
    """Two of 0.4 at ticks 0 and 2; at 1 there is one, in the middle."""
    places = parts.grouped_bars(panel, TABLE)
    assert bars(panel) == {
        "a": [(-0.2, 0, 0.4, 1), (1.0, 0, 0.4, 2), (1.8, 0, 0.4, 3)],
        "b": [(0.2, 0, 0.4, 4), (2.2, 0, 0.4, 6)],
    }
    assert [text.get_text() for text in panel.get_xticklabels()] == ["x", "y", "z"]
    assert panel.get_xticks().tolist() == [0, 1, 2]
    assert places["a"] == pytest.approx([-0.2, 1.0, 1.8]) and places["b"][[0, 2]] == pytest.approx([0.2, 2.2])
    assert colors(panel) == [to_hex(fill_style(index)["facecolor"]) for index in (0, 1)]
    assert not panel.texts


def test_bars_of_another_width_style_and_name_with_their_values(panel: Axes) -> None:
    parts.grouped_bars(panel, TABLE, (3, 2), width=0.1, labels=("first", "second"), fmt="{:.1f}")
    assert bars(panel)["first"][0] == (-0.05, 0, 0.1, 1) and list(bars(panel)) == ["first", "second"]
    assert colors(panel) == [to_hex(fill_style(index)["facecolor"]) for index in (3, 2)]
    assert [text.get_text() for text in panel.texts] == ["1.0", "2.0", "3.0", "4.0", "6.0"]


def test_bars_are_stacked_and_the_middles_of_their_parts_known(panel: Axes) -> None:
    middles = parts.stacked_bars(panel, (5.0, 7.0), pd.DataFrame({"a": [1.0, 2.0], "b": [4.0, 6.0]}))
    assert bars(panel) == {"a": [(5, 0, 0.8, 1), (7, 0, 0.8, 2)], "b": [(5, 1, 0.8, 4), (7, 2, 0.8, 6)]}
    assert middles.to_numpy().tolist() == [[0.5, 3.0], [1.0, 5.0]]
    assert colors(panel) == [to_hex(fill_style(index)["facecolor"]) for index in (0, 1)]


def test_a_row_or_a_column_of_panels_for_each_value() -> None:
    data = pd.DataFrame({"hardware": ["h200", "a100", "h200"], "kind": ["x", "y", "y"], "value": [1, 2, 3]})
    figure, facets = parts.facet(data, 2, 1.5, extra=0.5)
    assert [(each.name, each.data["value"].to_list(), len(each.panels)) for each in facets] == [
        *(("h200", [1, 3], 2), ("a100", [2], 2))
    ]
    rows = [[panel.get_subplotspec().rowspan.start for panel in each.panels] for each in facets]  # type: ignore[union-attr]
    assert rows == [[0, 0], [1, 1]] and figure.get_size_inches()[1] == 0.5 + 2 * 1.5
    assert not facets[0].panels[0].get_shared_x_axes().joined(facets[0].panels[0], facets[1].panels[0])
    figure, facets = parts.facet(data, 3, 1.5, by="kind", extra=0.5, across=True, sharex=True)
    assert [(each.name, each.data["value"].to_list()) for each in facets] == [("x", [1]), ("y", [2, 3])]
    columns = [[panel.get_subplotspec().colspan.start for panel in each.panels] for each in facets]  # type: ignore[union-attr]
    assert columns == [[0, 0, 0], [1, 1, 1]] and figure.get_size_inches()[1] == 0.5 + 1.5
    assert facets[0].panels[0].get_shared_x_axes().joined(facets[0].panels[0], facets[0].panels[2])
    plt.close("all")


def test_printed_points_are_marked_if_there_are_any(panel: Axes) -> None:
    parts.mark_printed(panel, ())
    assert not panel.get_lines()
    parts.mark_printed(panel, [(1, 4), (2, 6)], marker="s")
    [line] = panel.get_lines()
    assert (list(line.get_xdata()), list(line.get_ydata()), line.get_marker()) == ([1, 2], [4, 6], "s")


def test_a_logarithmic_axis_with_plain_numbers(panel: Axes) -> None:
    panel.plot([2, 2000], [0, 1])
    parts.log_x(panel, (2, 50, 2000), base=2.0)
    assert (panel.get_xscale(), panel.xaxis.get_transform().base) == ("log", 2.0)  # type: ignore[attr-defined]
    assert [text.get_text() for text in panel.get_xticklabels()] == ["2", "50", "2000"]
    assert [text.get_text() for text in panel.get_xticklabels(minor=True) if text.get_text()] == []
    parts.log_x(panel)
    assert panel.xaxis.get_transform().base == 10  # type: ignore[attr-defined]


def test_an_axis_on_which_nothing_was_drawn_is_left_alone(panel: Axes) -> None:
    before = panel.xaxis.get_major_formatter()
    panel.set_xlim(-1, 1)
    parts.label_log(panel.xaxis)
    assert panel.xaxis.get_major_formatter() is before


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.5, 2000, [1, 10, 100, 1000]),  # a tick for each decade
        (0.9, 31, [1, 3, 10, 30]),
        (2, 11, [2, 5, 10]),
        (2, 8, [2, 3, 5, 7]),  # 1, 2 and 5 give two of them
        (10, 12.5, [10, 10.5, 11, 11.5, 12, 12.5]),
        (4.3, 5.1, [4.4, 4.6, 4.8, 5]),  # at most five steps
    ],
)
def test_labels_of_a_logarithmic_axis_by_its_decades(panel: Axes, low: float, high: float, labels: list[float]) -> None:
    panel.set(yscale="log", ylim=(low, high))
    parts.label_log(panel.yaxis)
    assert panel.get_yticks() == pytest.approx(labels)
    panel.set(yscale="log", ylim=(high, low))  # upside down
    parts.label_log(panel.yaxis)
    assert panel.get_yticks() == pytest.approx(labels)


def test_lanes_and_their_spans(panel: Axes) -> None:
    parts.lane_axes(panel, ("host", "device"), 2.0, 9.0)
    assert (panel.get_xlim(), panel.get_ylim()) == ((2, 9), (-0.6, 1.6))
    ticks = dict(zip(panel.get_yticks(), [text.get_text() for text in panel.get_yticklabels()], strict=True))
    assert ticks == {0: "host", 1: "device"} and not panel.spines["left"].get_visible()
    parts.draw_spans(panel, 1, [(3.0, 2.0), (6.0, 0.5)], linewidth=0.7)
    corners = [path.vertices[:4].tolist() for path in panel.collections[0].get_paths()]
    assert corners == [[[3, 0.6], [3, 1.4], [5, 1.4], [5, 0.6]], [[6, 0.6], [6, 1.4], [6.5, 1.4], [6.5, 0.6]]]
    assert panel.collections[0].get_linewidth() == [0.7]


def test_a_legend_has_each_label_once_and_one_of_them_last() -> None:
    figure, [panels] = new_figure(1, 2, 2.0)
    for panel, labels in zip(panels, (("measured here", "a"), ("a", "b")), strict=True):
        for label in labels:
            panel.plot([0], [0], label=label)
    drawn: dict[str, Any] = {}
    for last, expected in (("", ["measured here", "a", "b"]), ("measured", ["a", "b", "measured here"])):
        figure.legends.clear()
        parts.legend(figure, panels, last=last, title="t", ncols=3)
        [drawn["legend"]] = figure.legends
        assert [text.get_text() for text in drawn["legend"].get_texts()] == expected
    handles = drawn["legend"].legend_handles
    assert [handle.get_color() for handle in handles] == [
        *(panels[0].lines[1].get_color(), panels[1].lines[1].get_color(), panels[0].lines[0].get_color())
    ]
    assert drawn["legend"].get_title().get_text() == "t"
    plt.close("all")


def test_a_series_is_a_line_with_a_band_where_runs_differ(panel: Axes) -> None:
    points = pd.DataFrame({"x": [1, 2, 3], "mean": [2.0, 3.0, np.nan], "low": [2.0, 1.0, 0.0], "high": [2.0, 5.0, 9.0]})
    parts.draw_series(panel, points, "x", "name", 1)
    [line], [band] = panel.get_lines(), panel.collections
    assert (list(line.get_xdata()), list(line.get_ydata()), line.get_label()) == ([1, 2], [2, 3], "name")
    assert {tuple(point) for point in band.get_paths()[0].vertices.tolist()} == {(1, 2), (2, 1), (2, 5)}
    parts.draw_series(panel, points[:1], "x", "alone", 2)
    assert len(panel.collections) == 1


def test_rates_are_scaled_and_have_a_line_for_each_label(panel: Axes) -> None:
    """The second of the labels has two runs at its one rate: 1 and 3, so 1,000 times 2."""
    data = pd.DataFrame({"label": ["a", "b", "b"], "rate": [5, 4, 4], "y": [2.0, 1.0, 3.0]})
    parts.draw_rates(panel, data, "y", ["a", "b"], 1e3)
    found = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in panel.get_lines()}
    assert found == {"a": ([5], [2000]), "b": ([4], [2000])}
    assert [line.get_color() for line in panel.get_lines()] == [line_style(index)["color"] for index in (0, 1)]
    assert len(panel.collections) == 1 and panel.get_xlim() == pytest.approx((3.7, 5.3))
    parts.draw_rates(panel, data, "y", ["a"])
    assert list(panel.get_lines()[-1].get_ydata()) == [2]


@pytest.mark.parametrize(
    ("low", "high"), [(4.3, 5.1), (0.015, 0.036), (4, 60), (0.01, 2), (0.001, 300), (1, 10), (95, 105), (0.3, 0.9)]
)
def test_a_logarithmic_axis_has_a_few_labels_that_do_not_touch(low: float, high: float) -> None:
    figure, [panels] = new_figure(1, 3, 2.7)
    for panel in panels:
        panel.plot([low, high], [0, 1])
        panel.set_xscale("log")
        parts.label_log(panel.xaxis)
    figure.draw_without_rendering()
    assert_labels_stand_apart(panels[0])


def assert_labels_stand_apart(panel: Axes) -> None:
    ticks = [*panel.xaxis.get_major_ticks(), *panel.xaxis.get_minor_ticks()]
    left, right = sorted(panel.get_xlim())
    shown = [tick.label1 for tick in ticks if tick.label1.get_text() and left <= tick.get_loc() <= right]
    assert 3 <= len(shown) <= 7
    boxes = sorted((text.get_window_extent() for text in shown), key=lambda box: box.x0)
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


def test_ticks_at_swept_values_leave_out_those_too_close() -> None:
    assert parts.apart([200, 1, 2, 5, 10, 14, 20, 28, 50, 100, 2], math.log(1.5)) == [1, 2, 5, 10, 20, 50, 100, 200]
    assert parts.apart([2.0, 2.01, 2.02], math.log(1.009)) == [2.0, 2.02]
    assert parts.apart([math.e, 1.0], 1.0) == [1.0, math.e]


def test_sixteen_series_can_be_told_apart_without_colour() -> None:
    looks = {(style["marker"], "markerfacecolor" in style) for style in map(line_style, range(16))}
    assert len(looks) == len({line_style(index)["color"] for index in range(16)}) == 16
