"""Building blocks of the figures of papers: where bars and marks stand, from values given by hand."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.axes import Axes

from experiments.plots.style import new_figure
from reproduction import parts

TABLE = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4.0, None, 6.0]}, index=["x", "y", "z"])


@pytest.fixture
def panel() -> Axes:
    plt.close("all")
    return new_figure(1, 1, 2.0)[1][0][0]


def bars(panel: Axes) -> dict[str, list[tuple[float, float, float]]]:
    """Returns x of the middle, bottom and height of each bar, by label."""
    return {
        str(group.get_label()): [
            (round(bar.get_x() + bar.get_width() / 2, 9), bar.get_y(), bar.get_height()) for bar in group
        ]
        for group in panel.containers
    }


def test_bars_stand_side_by_side_around_their_tick(panel: Axes) -> None:
    """Two of 0.4 at ticks 0 and 2; at 1 there is one, in the middle."""
    places = parts.grouped_bars(panel, TABLE, (3, 2), labels=("first", "second"), fmt="{:.1f}")
    assert bars(panel) == {"first": [(-0.2, 0, 1), (1.0, 0, 2), (1.8, 0, 3)], "second": [(0.2, 0, 4), (2.2, 0, 6)]}
    assert places["a"] == pytest.approx([-0.2, 1.0, 1.8]) and places["b"][[0, 2]] == pytest.approx([0.2, 2.2])
    assert [text.get_text() for text in panel.texts] == ["1.0", "2.0", "3.0", "4.0", "6.0"]


def test_bars_are_stacked_and_the_middles_of_their_parts_known(panel: Axes) -> None:
    middles = parts.stacked_bars(panel, (5.0, 7.0), pd.DataFrame({"a": [1.0, 2.0], "b": [4.0, 6.0]}))
    assert bars(panel) == {"a": [(5, 0, 1), (7, 0, 2)], "b": [(5, 1, 4), (7, 2, 6)]}
    assert middles.to_numpy().tolist() == [[0.5, 3.0], [1.0, 5.0]]


def test_a_row_or_a_column_of_panels_for_each_value() -> None:
    data = pd.DataFrame({"hardware": ["h200", "a100", "h200"], "kind": ["x", "y", "y"], "value": [1, 2, 3]})
    _, facets = parts.facet(data, 2, 1.5, extra=0.5)
    assert [(each.name, each.data["value"].to_list(), len(each.panels)) for each in facets] == [
        *(("h200", [1, 3], 2), ("a100", [2], 2))
    ]
    _, facets = parts.facet(data, 3, 1.5, by="kind", across=True)
    assert [(each.name, each.data["value"].to_list(), len(each.panels)) for each in facets] == [
        *(("x", [1], 3), ("y", [2, 3], 3))
    ]


def test_printed_points_are_marked_if_there_are_any(panel: Axes) -> None:
    parts.mark_printed(panel, ())
    assert not panel.get_lines()
    parts.mark_printed(panel, [(1, 4), (2, 6)], marker="s")
    [line] = panel.get_lines()
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2], [4, 6])


def test_a_legend_has_each_label_once_and_one_of_them_last() -> None:
    figure, [panels] = new_figure(1, 2, 2.0)
    for panel, labels in zip(panels, (("measured here", "a"), ("a", "b")), strict=True):
        for label in labels:
            panel.plot([0], [0], label=label)
    parts.legend(figure, panels, last="measured")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "measured here"]
