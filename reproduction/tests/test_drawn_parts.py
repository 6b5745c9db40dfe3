"""Bars of papers' figures, lanes of a run, and idle stages: where marks stand, from values given by hand."""

from pathlib import Path

import pandas as pd
import pytest
from hand_made import write_run
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from experiments.plots.style import COPY, HOST, IDLE, PREFILL, new_figure
from reproduction import parts
from reproduction.validation import lanes


def bars(panel: Axes) -> dict[str, list[tuple[float, float, float]]]:
    """Returns x of the middle, bottom and height of each bar, by label."""
    return {
        str(group.get_label()): [(round(bar.get_x() + bar.get_width() / 2, 9), bar.get_y(), bar.get_height()) for bar in group]
        for group in panel.containers
    }  # fmt: skip


def test_bars_stand_side_by_side_around_their_tick() -> None:
    """Two of 0.4 at ticks 0 and 2; at 1 there is one, in the middle."""
    panel = new_figure(1, 1, 2.0)[1][0][0]
    table = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4.0, None, 6.0]}, index=["x", "y", "z"])
    places = parts.grouped_bars(panel, table)
    assert bars(panel) == {"a": [(-0.2, 0, 1), (1.0, 0, 2), (1.8, 0, 3)], "b": [(0.2, 0, 4), (2.2, 0, 6)]}
    assert places["a"] == pytest.approx([-0.2, 1.0, 1.8]) and places["b"][[0, 2]] == pytest.approx([0.2, 2.2])


@pytest.mark.parametrize("copies", [False, True])
def test_lanes_show_what_host_and_device_do(copies: bool, tmp_path: Path) -> None:
    """Iterations 1 and 2, from 3.5 s, the start of the one, to 8 s, the end of the other."""
    [axes] = lanes.draw(write_run(tmp_path / "run", copies=copies), first=1, iterations=2).axes
    names = {tick: text.get_text() for tick, text in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for group in axes.collections:
        for box in (path.get_extents() for path in group.get_paths()):
            lane = names[round((box.y0 + box.y1) / 2)], to_hex(group.get_facecolor()[0]).upper()
            spans.setdefault(lane, []).append((box.x0, box.width))
    host = {
        ("host", HOST): [(-250, 250), (2000, 500), (1500, 500), (4500, 250)],  # plan and launch, then absorb
        ("host", IDLE): [(125, 1375), (2625, 1875)],
        ("device", PREFILL): [(0, 1500), (2500, 2000)],
    }
    assert {lane: found for lane, found in spans.items() if lane[1] != COPY} == host
    assert [lane for lane in spans if lane[1] == COPY] == ([("copy in", COPY), ("copy out", COPY)] if copies else [])
    assert {"25.0%", "75.0%"} <= {text.get_text() for text in axes.texts}, "active shares of the run"
