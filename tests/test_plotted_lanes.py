"""What the lanes of host and device show, of a run made by hand (`hand_made`) and of a benchmark's file."""

import json
from pathlib import Path
from typing import Any

import pytest
from hand_made import write_run
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from cbatch import ConfigError
from experiments.plots import lanes
from experiments.plots.style import COPY, DECODE, HOST, IDLE, PREFILL


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


def test_lanes_tell_decodes_alone_from_prompts(folder: Path) -> None:
    figure = lanes.draw(folder, first=3, iterations=2)
    found = spans(figure.axes[0])
    assert found["device", PREFILL] == [(0, 2500)]
    assert found["device", DECODE] == [(3000, 500)]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["compute, with prompts", "compute, decodes alone", "plan, launch, absorb", "wait"]


def test_lanes_of_timed_copies(tmp_path: Path) -> None:
    figure = lanes.draw(write_run(tmp_path / "run", copies=True), first=1, iterations=1)
    [axes] = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["host", "copy in", "device", "copy out"]
    found = spans(axes)
    assert found["copy in", COPY] == [(-250, 250)]
    assert found["copy out", COPY] == [(1375, 125)]
    assert "copy" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert {text.get_text(): text.get_position()[1] for text in axes.texts} == {"25.0%": 3, "75.0%": 1, "1": 1}


def test_only_runs_that_timed_copies_have_lanes_for_them(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {"policy": "orca"})
    write_run(tmp_path / "b", copies=True)
    figure = lanes.draw(tmp_path, first=1, iterations=1)
    assert [len(axes.get_yticks()) for axes in figure.axes] == [2, 4]
    assert "copy" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_loop_that_was_swept_is_named_once(tmp_path: Path) -> None:
    for loop in ("sync", "async"):
        write_run(tmp_path / loop, {"runtime": loop, "overrides": [f"runtime={loop}"]})
    titles = [axes.get_title(loc="left") for axes in lanes.draw(tmp_path, first=1, iterations=1).axes]
    assert titles == ["prefill_first, runtime=async", "prefill_first, runtime=sync"]


@pytest.mark.parametrize(("share", "text"), [(0.5, "50.0%"), (0.9994, "99.9%"), (0.9996, "99.96%"), (1.0, "100.0%")])
def test_a_share_is_100_percent_only_if_it_is(share: float, text: str) -> None:
    assert lanes._percent(share) == text


# -- of a benchmark ---------------------------------------------------------------------------------------------------


def loop(seconds: float, per_iteration: float, host: float, active: float) -> dict[str, Any]:
    """Five iterations of 5 ms, planned one after the other; what is measured is the median of repetitions."""
    times = {
        "planned_at": 0,
        "launched_at": 1,
        "waited_at": 2,
        "received_at": 7,
        "done_at": 8,
        "started": 1,
        "ended": 6,
    }
    return {
        "lanes": {name: [10.0 * index + time for index in range(5)] for name, time in times.items()},
        "seconds": {"median": seconds, "min": 0.0},
        "ms_per_iteration": {"median": per_iteration, "min": 0.0},
        "host_ms_per_iteration": {"median": host, "min": 0.0},
        "active_share": {"median": active, "min": 0.0},
    }


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    """Of 256 and 512 tokens one loop was measured, of 2,048 both."""
    both = {"async": loop(2.5, 5.0, 1.0, 0.99), "sync": loop(4.0, 8.0, 2.0, 0.625)}
    one = loop(1.0, 2.0, 0.5, 0.5)
    content = {
        "model": "llama-13b",
        "batch": 32,
        "prompt": 128,
        "hardware": "NVIDIA H200",
        "figures": {"256": {"sync": one}, "512": {"async": one}, "2,048": both},
    }
    (tmp_path / "async.json").write_text(json.dumps(content))
    return tmp_path


def test_lanes_of_a_benchmark_show_both_loops(compared: Path) -> None:
    """The first three iterations, from 1 ms, when the device starts, to 26 ms."""
    figure = lanes.draw(compared)
    titles = ["sync: 4.00 s, 8.00 ms per iteration", "async: 2.50 s, 5.00 ms per iteration"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == titles
    for axes, shares in zip(figure.axes, (["25.0%", "62.5%"], ["20.0%", "99.0%"]), strict=True):
        assert axes.get_xlim() == (0, pytest.approx(25))
        assert [text.get_text() for text in axes.texts] == ["0", "1", "2", *shares]
        found = {kind: [pytest.approx(span) for span in each] for kind, each in spans(axes).items()}
        assert found == {
            ("host", HOST): [(-1, 1), (9, 1), (19, 1), (6, 1), (16, 1), (26, 1)],
            ("host", IDLE): [(1, 5), (11, 5), (21, 5)],
            ("device", DECODE): [(0, 5), (10, 5), (20, 5)],
        }
    assert figure.axes[-1].get_xlabel().startswith("time since the start of a decode iteration [ms]")
    legend = figure.legends[0]
    says = "llama-13b, 32 requests of 128 prompt and 2,048 tokens"
    assert legend.get_title().get_text() == says and figure.get_supxlabel() == "measured on NVIDIA H200"
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["compute, decodes alone", "plan, launch, absorb", "wait"]


def test_of_a_benchmark_of_few_iterations_the_first_is_shown(compared: Path) -> None:
    content = json.loads((compared / "async.json").read_text())
    for name, times in (kept := content["figures"]["512"]["async"]["lanes"]).items():
        kept[name] = times[:3]
    (compared / "async.json").write_text(json.dumps(content))
    [axes] = lanes.draw(compared, runs="512").axes
    assert axes.get_xlim() == (0, pytest.approx(5))


def test_one_batch_of_a_benchmark_is_chosen_by_its_name(compared: Path) -> None:
    [axes] = lanes.draw(compared, runs="51").axes
    assert axes.get_title(loc="left") == "async: 1.00 s, 2.00 ms per iteration"
    with pytest.raises(ConfigError, match=r"runs=77: .*async\.json has 256, 512, 2,048; choose one"):
        lanes.draw(compared, runs="77")


def test_an_iteration_that_the_run_does_not_have(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"first=5 iterations=2: .* has iterations 0 to 4; choose among them"):
        lanes.draw(folder, first=5, iterations=2)
    with pytest.raises(ConfigError, match=r"first=20 iterations=8: "):  # unless told otherwise
        lanes.draw(folder)
