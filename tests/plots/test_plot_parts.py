"""Building blocks of plots: labels of logarithmic axes, and styles that can be told apart."""

import warnings
from itertools import pairwise

import pytest

from experiments.plots import parts
from experiments.plots.parts import PlainNumbers, wrap
from experiments.plots.style import add_heading, line_style, new_figure, print_style


@pytest.mark.parametrize("values", [[], [0.0, 0.0]], ids=["nothing", "zeros"])
def test_an_axis_without_positive_values_can_be_drawn(values: list[float]) -> None:
    figure, [[panel]] = new_figure(1, 1, 2.7)
    panel.plot(values, values)
    with warnings.catch_warnings(action="ignore"):  # that there is none
        panel.set(xscale="log", yscale="log")
    parts.label_log(panel.xaxis)
    parts.label_log(panel.yaxis)
    figure.draw_without_rendering()


def test_a_label_on_y_is_no_longer_than_its_panel() -> None:
    """The names below the panels take half of the height: two lines; of a single long word smaller type."""
    figure, [panels] = new_figure(1, 2, 2.6)
    for panel, text in zip(panels, ("mean job time without pauses [s]", "job_time_without_pauses[s]"), strict=True):
        parts.name_places(panel, ["1 prefill + 3 decode", "2 prefill + 2 decode"])
        panel.set_ylabel(text)
    add_heading(figure, "a heading", [], (), None)
    figure.draw_without_rendering()
    heights = [panel.yaxis.label.get_window_extent().height / panel.bbox.height for panel in panels]
    assert max(heights) <= 1.05, heights
    assert panels[0].get_ylabel().count("\n") == 1
    sizes = [panel.yaxis.label.get_fontsize() for panel in panels]
    assert sizes[1] < sizes[0]


def test_all_notes_stand_below_a_figure() -> None:
    """In lines of at most 145 characters; each line beyond two makes the figure higher, unless its size is given."""
    notes = [" ".join(letter * 60) for letter in "abcd"]  # of 119 characters
    for size, height in ((None, 2.2), ((7.0, 2.0), 2.0)):
        figure, _ = new_figure(1, 1, 2.0)
        add_heading(figure, "", notes, (), size)
        lines = figure.get_supxlabel().splitlines()
        assert " ".join(lines) == "; ".join(notes) and len(lines) == 4 and max(map(len, lines)) <= 145
        assert figure.get_figheight() == pytest.approx(height)


def test_a_long_label_is_broken_and_makes_the_figure_higher() -> None:
    """Half a page has room for 54 characters of a label."""
    figure, [[panel]] = new_figure(1, 1, 2.0)
    handles = panel.plot([1, 2], label=" = ".join(["sarathi_serve"] * 7)) + panel.plot([2, 1], label="orca")
    add_heading(figure, "", (), handles, (3.5, 2.0))
    long, short = (text.get_text() for text in figure.legends[0].get_texts())
    assert long.count("\n") == 2 and max(map(len, long.splitlines())) <= 54 and short == "orca"
    add_heading(figure, "", (), handles, None)
    assert figure.get_figheight() == pytest.approx(2.0 + 0.15 * 3)


def test_sixteen_series_can_be_told_apart_without_colour() -> None:
    looks = {(style["marker"], style["fillstyle"]) for style in map(line_style, range(16))}
    assert len(looks) == len({line_style(index)["color"] for index in range(16)}) == 16


@pytest.mark.long
@pytest.mark.parametrize(("width", "number"), [(7, 3), (3.5, 2)])
def test_the_numbers_of_a_logarithmic_axis_do_not_touch_on_narrow_panels(width: float, number: int) -> None:
    """At 3.5 inches 0.02, 0.05, 0.1 and 0.2 would lie on each other."""
    figure, [panels] = new_figure(1, 3, 2)
    figure.set_size_inches(width, 2)
    for panel in panels:
        panel.plot([0.012, 0.31], [0, 1])
        panel.set_xscale("log")
        parts.label_log(panel.xaxis)
    figure.canvas.draw()
    for panel in panels:
        boxes = [label.get_window_extent() for label in panel.get_xticklabels() if label.get_text()]
        ends = sorted((box.x0, box.x1) for box in boxes)
        assert len(ends) >= number and all(one[1] < two[0] for one, two in pairwise(ends))


@print_style()
def test_the_labels_of_an_axis_are_its_numbers_without_an_offset() -> None:
    """A ratio near 1: matplotlib would write -5, 0 and 5 beside "1e-5+1"."""
    figure, [[panel]] = new_figure(1, 1, 2.0)
    panel.plot([0, 1], [0.99995, 1.00005])
    figure.canvas.draw()
    assert panel.yaxis.get_offset_text().get_text() == ""
    assert {"0.99998", "1.00000", "1.00002"} <= {label.get_text() for label in panel.get_yticklabels()}


@pytest.mark.parametrize("size", [None, (3.5, 2.5)])
@pytest.mark.parametrize("letter", ["m", "i"])
def test_a_heading_has_margins_whatever_its_letters(letter: str, size: tuple[float, float] | None) -> None:
    figure, [[panel]] = new_figure(1, 1, 2.7)
    for handles in ((), panel.plot([1], label="a")):
        add_heading(figure, ", ".join([letter * 5] * 14), (), handles, size)
        text = figure.legends[0].get_title() if handles else figure.texts[0]
        assert 0.5 < text.get_window_extent().width / figure.bbox.width < 0.98


def test_no_last_word_stands_alone() -> None:
    assert wrap("the first token after 5 seconds", 28) == "the first token\nafter 5 seconds"
    figure, _ = new_figure(1, 1, 2.0)
    add_heading(figure, f"{'x' * 80}, 1 large and 4 small replicas, router round_robin", (), (), None)
    assert figure.get_suptitle() == f"{'x' * 80},\n1 large and 4 small replicas, router round_robin"
    assert wrap("", 9) == "" and wrap("llama-3.1-8b", 9).replace("\n", "") == "llama-3.1-8b"


@print_style()
def test_a_logarithmic_axis_over_less_than_a_factor_of_four_has_four_labels_or_more() -> None:
    """A median between tokens from 4 to 8 ms, on an axis from 3.3 to 9.9: it had 5 and 7 alone."""
    figure, [[panel]] = new_figure(1, 1, 2.0)
    panel.plot([0, 1], [3.9, 8.1])
    panel.set(yscale="log", ylim=(3.3, 9.9))
    parts.label_log(panel.yaxis, least_factor=1.5)
    figure.canvas.draw()
    shown = [label for label in panel.get_yticklabels() if label.get_text() and 3.3 <= label.get_position()[1] <= 9.9]
    assert [label.get_text() for label in shown] == ["4", "5", "6", "8"]


def test_ticks_have_equally_many_decimals_and_commas() -> None:
    assert PlainNumbers().format_ticks([0, 2.5, 5, 1000]) == ["0.0", "2.5", "5.0", "1,000.0"]
    assert PlainNumbers().format_ticks([0, 500, 1000]) == ["0", "500", "1,000"]
    assert PlainNumbers().format_ticks([0.1 + 0.2, 0.4]) == ["0.3", "0.4"]
