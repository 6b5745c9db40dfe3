"""What the lanes of host and device show, of a run made by hand (`hand_made`)."""

from pathlib import Path

import pytest
from hand_made import write_run
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from experiments.plots.style import COPY, HOST, IDLE, PREFILL
from reproduction.validation import lanes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("drawn") / "run")


def spans(axes: Axes) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(begin, length) of the bars by lane and colour, in milliseconds."""
    names = {tick: text.get_text() for tick, text in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for bars in axes.collections:
        for path in bars.get_paths():
            box = path.get_extents()
            colour = to_hex(bars.get_facecolor()[0]).upper()
            found.setdefault((names[round((box.y0 + box.y1) / 2)], colour), []).append((box.x0, box.width))
    return found


def test_lanes_show_what_host_and_device_do(folder: Path) -> None:
    """Iterations 1 and 2, from 3.5 s, the start of the one, to 8 s, the end of the other."""
    [axes] = lanes.draw(folder, first=1, iterations=2).axes
    assert spans(axes) == {
        ("host", HOST): [(-250, 250), (2000, 500), (1500, 500), (4500, 250)],  # plan and launch, then absorb
        ("host", IDLE): [(125, 1375), (2625, 1875)],
        ("device", PREFILL): [(0, 1500), (2500, 2000)],
    }
    assert axes.get_xlim() == (0, 4500)
    texts = {text.get_text(): text.get_position() for text in axes.texts}
    assert texts == {"25.0%": (1.005, 1), "75.0%": (1.005, 0), "1": (750, 0), "2": (3500, 0)}
    assert axes.get_title(loc="left") == "prefill_first, async"
    says = "time since the start of iteration 1 [ms]; at the right, the lane's active share of the run"
    assert axes.get_xlabel() == says


def test_lanes_of_timed_copies(tmp_path: Path) -> None:
    figure = lanes.draw(write_run(tmp_path / "run", copies=True), first=1, iterations=1)
    [axes] = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["host", "copy in", "device", "copy out"]
    found = spans(axes)
    assert found["copy in", COPY] == [(-250, 250)]
    assert found["copy out", COPY] == [(1375, 125)]
    assert "copy" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert {text.get_text(): text.get_position()[1] for text in axes.texts} == {"25.0%": 3, "75.0%": 1, "1": 1}
