"""What the plot of simulated against measured figures shows of a file made by hand."""

from typing import Any

import pytest

from reproduction.validation import plot


def made(measured: float, simulated: float) -> dict[str, Any]:
    """One run whose figures are all alike, but in other units of their own."""
    names = {"total time": 1.0, "TTFT mean": 0.1, "TTFT P99": 0.2, "TBT P50": 0.01, "TBT P90": 0.02}
    error = simulated / measured - 1
    return {
        "measured": {name: unit * measured for name, unit in names.items()},
        "simulated": {name: unit * simulated for name, unit in names.items()},
        "error": dict.fromkeys(names, error),
        "error_range": {name: [error - 0.01, error + 0.02] for name in names},
    }


COMPARED = {
    "profile": "h200",
    "targets": {"total time": 0.03, "TTFT mean": 0.05, "TTFT P99": 0.1, "TBT P50": 0.05, "TBT P90": 0.1},
    "measured": [{"hardware": "NVIDIA H200", "date": "2026-01-02"}],
    "cases": {"trace": {"orca": made(10, 11), "sarathi": made(20, 18)}, "pd": {"orca": made(30, 30)}},
}


def test_simulated_values_stand_over_measured_ones() -> None:
    figure = plot.draw(COMPARED)
    points = [axes.get_lines()[:-1] for axes in figure.axes[:3]]  # the last is the diagonal
    places = [[(line.get_xdata()[0], line.get_ydata()[0]) for line in lines] for lines in points]
    runs = [(1, 1.1), (2, 1.8), (3, 3)]
    assert places[0] == [(10, 11), (20, 18), (30, 30)]
    assert places[1] == [pytest.approx((x * k, y * k)) for x, y in runs for k in (1, 2)]
    assert places[2] == [pytest.approx((100 * x * k, 100 * y * k)) for x, y in runs for k in (1, 2)], "in ms"
    assert [line.get_markerfacecolor() == "none" for line in points[1]] == 3 * [False, True], "the tail's percentiles"


def test_errors_keep_their_signs_and_ranges() -> None:
    below = plot.draw(COMPARED).axes[3:]
    lines = below[0].get_lines()
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in lines if len(line.get_xdata()) == 1]
    ranges = [list(line.get_ydata()) for line in lines[:-1] if len(line.get_xdata()) == 2]
    assert points == [pytest.approx(point) for point in ((-0.38, 0.1), (0.0, -0.1), (0.38, 0.0))]
    assert ranges == [pytest.approx(ends) for ends in ([0.09, 0.12], [-0.11, -0.08], [-0.01, 0.02])]
