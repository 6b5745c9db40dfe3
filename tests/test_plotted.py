"""What plots draw - lines, areas, spans, labels - of a run made by hand (`hand_made`)."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hand_made import write_run
from matplotlib.axes import Axes

from cbatch import ConfigError
from experiments.plots import composition, latency_cdf, throughput_vs_pd
from experiments.plots.series import choose_runs, label_runs, load_runs


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    yield
    plt.close("all")


Points = tuple[list[float], list[float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("drawn") / "run")


def lines(axes: Axes) -> dict[str, Points]:
    """x and y of each line, by its label."""
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def words(axes: Axes) -> tuple[str, str]:
    return axes.get_xlabel(), axes.get_ylabel()


# -- latencies --------------------------------------------------------------------------------------------------------


def test_distributions_of_what_a_client_sees(folder: Path) -> None:
    figure = latency_cdf.draw(folder)
    first, between, whole = figure.axes
    assert lines(first) == {"prefill_first": ([2.5, 2.75, 9.5], [0, 0.5, 1])}
    assert lines(between) == {"prefill_first": ([1000, 2000, 3000], [0, 0.5, 1])}
    assert lines(whole) == {"prefill_first": ([2.5, 7.75, 10.5], [0, 0.5, 1])}
    names = ["time to first token [s]", "time between tokens [ms]", "end-to-end latency [s]"]
    assert [axes.get_xlabel() for axes in figure.axes] == names
    assert first.get_ylabel() == "share of requests, or of gaps"
    assert [axes.get_xscale() for axes in figure.axes] == ["log"] * 3
    assert [axes.get_ylim() for axes in figure.axes] == [(0, 1.01)] * 3
    assert first.get_lines()[0].get_drawstyle() == "steps-post"
    assert (first.yaxis.get_major_formatter()(0.5), first.xaxis.get_major_formatter()(2.5)) == ("50%", "2.5")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["prefill_first"]


def test_distributions_of_many_values_are_thinned_out_to_quantiles() -> None:
    axes = latency_cdf.new_figure(1, 1, 1)[1][0][0]
    latency_cdf._draw_distribution(axes, np.arange(5001.0), "many", 0)
    latency_cdf._draw_distribution(axes, np.zeros(0), "none", 1)
    x, y = lines(axes)["many"]
    assert len(x) == 1000 and np.allclose(x, 5000 * np.array(y)) and (y[0], y[-1]) == (0, 1)
    assert lines(axes)["none"] == ([], [])


# -- composition ------------------------------------------------------------------------------------------------------


def area_at(axes: Axes, x: float, y: float) -> str:
    """The label of the area that covers a point."""
    covering = [str(area.get_label()) for area in axes.collections if area.get_paths()[0].contains_point((x, y))]
    return " and ".join(covering)


def test_tokens_of_iterations_are_stacked_over_time(folder: Path) -> None:
    figure = composition.draw(folder)
    tokens, requests, memory = figure.axes
    assert [area.get_label() for area in tokens.collections] == ["decode", "prefill", "padding"]
    assert [area_at(tokens, 2, y) for y in (0.5, 4.5, 5.5, 7.5, 8.5)] == ["prefill"] * 2 + ["padding"] * 2 + [""]
    assert [area_at(tokens, 4, y) for y in (0.5, 1.5, 4.5, 5.5)] == ["decode", "prefill", "prefill", ""]
    assert [area_at(tokens, 9, y) for y in (0.5, 6.5, 7.5, 8.5)] == ["prefill", "prefill", "padding", ""]
    started = [1.25, 3.5, 6.0, 8.5, 11.5]
    assert lines(requests) == {"running": (started, [1, 2, 0, 1, 0]), "waiting": (started, [1, 0, 1, 0, 0])}
    [(x, y)] = lines(memory).values()
    assert (x, y) == (started, pytest.approx([0.1, 0.25, 0.3, 0.15, 0.15]))
    assert [words(axes) for axes in figure.axes] == [
        *(("", "tokens per iteration"), ("", "requests"), ("time [s]", "KV cache used"))
    ]
    assert figure.get_suptitle() == "prefill_first: llama-13b, closed, length 8, batch 4 (each iteration)"
    assert figure.get_supxlabel() == "measured on a computer"
    assert memory.yaxis.get_major_formatter()(0.25) == "25%"
    assert all(axes.get_ylim()[0] == 0 for axes in figure.axes)
    assert {line.get_drawstyle() for axes in (requests, memory) for line in axes.get_lines()} == {"steps-post"}


def test_kinds_of_tokens_that_do_not_occur_are_left_out(folder: Path) -> None:
    tokens = composition.draw(folder, begin=3.0, end=7.0).axes[0]
    assert [text.get_text() for text in tokens.get_legend().get_texts()] == ["decode", "prefill"]


@pytest.mark.parametrize(
    ("begin", "end", "shown"), [(3.5, 8.5, [3.5, 6.0, 8.5]), (3.6, 8.4, [6.0]), (0.0, 1.25, [1.25])]
)
def test_iterations_that_start_within_the_given_seconds(folder: Path, begin: float, end: float, shown: object) -> None:
    assert lines(composition.draw(folder, begin=begin, end=end).axes[1])["running"][0] == shown
    with pytest.raises(ConfigError, match=r"begin=12 end=13: no iteration starts in these seconds"):
        composition.draw(folder, begin=12, end=13)


def test_of_more_iterations_than_can_be_seen_means_are_drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two spans of 5.125 s: three iterations in one, two in the other."""
    monkeypatch.setattr(composition, "_MOST_STEPS", 2)
    figure = composition.draw(folder)
    starts = [(1.25 + 3.5 + 6.0) / 3, (8.5 + 11.5) / 2]
    assert lines(figure.axes[1]) == {"running": (starts, [1.0, 0.5]), "waiting": (starts, [2 / 3, 0.0])}
    assert figure.get_suptitle().endswith("(means over 5.12 s)")
    later = lines(composition.draw(folder, begin=6.0).axes[1])  # spans of 2.75 s
    assert later == {"running": ([7.25, 11.5], [0.5, 0.0]), "waiting": ([7.25, 11.5], [0.5, 0.0])}


def test_composition_is_of_one_run(sweep: Path) -> None:
    with pytest.raises(ConfigError, match=r"this plot shows one run, the folder holds 2; .* choose with runs=TEXT"):
        composition.draw(sweep, runs="ratio=14")


# -- throughput against P:D -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens per second at three ratios, which orca did not finish; one run was done twice."""
    folder = tmp_path_factory.mktemp("sweep")
    speeds = {"orca": {14: 2500, 2: 1500}, "request_level": {28: 4000, 2: 1000, 14: 2000}}
    for policy, by_ratio in speeds.items():
        for ratio, speed in by_ratio.items():
            about = {"policy": policy, "overrides": [f"policy={policy}", f"workload.pd_ratio={ratio}"]}
            settings = {"workload": {"pd_ratio": ratio}}
            write_run(folder / f"{policy},ratio={ratio}", about, settings, speed=speed)
    write_run(folder / "request_level,ratio=2,z=1", about, {"workload": {"pd_ratio": 2}}, speed=9999)
    return folder


def test_throughput_and_gain_by_ratio(sweep: Path) -> None:
    figure = throughput_vs_pd.draw(sweep)
    speeds, gains = figure.axes
    assert lines(speeds) == {"request_level": ([2, 14, 28], [1, 2, 4]), "orca": ([2, 14], [1.5, 2.5])}
    assert list(lines(speeds)) == ["request_level", "orca"]  # the baseline first
    by_label = {label: points for label, points in lines(gains).items() if not label.startswith("_")}
    assert by_label == {"request_level": ([2, 14, 28], [1, 1, 1]), "orca": ([2, 14], [1.5, 1.25])}
    assert words(speeds) == ("P:D ratio [prefill / decode tokens]", "throughput [1,000 tokens/s]")
    assert words(gains) == ("P:D ratio [prefill / decode tokens]", "throughput over request_level")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["request_level", "orca"]
    assert speeds.get_ylim()[0] == 0


def test_gain_over_another_baseline(sweep: Path) -> None:
    gains = lines(throughput_vs_pd.draw(sweep, baseline="orca").axes[1])
    assert list(gains)[:2] == ["orca", "request_level"]
    assert gains["request_level"] == ([2, 14], [pytest.approx(1 / 1.5), 2 / 2.5])
    assert len(throughput_vs_pd.draw(sweep, baseline="sarathi").axes) == 1


def test_gain_over_a_baseline_with_chunks(tmp_path: Path) -> None:
    for policy, chunk, speed in (("orca", None, 3000), ("sarathi", 256, 2000)):
        about = {"policy": policy, "chunking": chunk and "tile_aligned", "chunk": chunk}
        for ratio in (2, 14):
            write_run(tmp_path / f"{policy},{ratio}", about, {"workload": {"pd_ratio": ratio}}, speed=speed)
    speeds, gains = throughput_vs_pd.draw(tmp_path, baseline="sarathi").axes
    assert lines(gains)["orca"] == ([2, 14], [1.5, 1.5]) and gains.get_ylabel() == "throughput over sarathi 256"
    assert (speeds.get_xscale(), gains.get_xscale()) == ("log", "log")


# -- names of runs ----------------------------------------------------------------------------------------------------


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame([{"folder": f"sweep/a/{index}", "name": "orca", **row} for index, row in enumerate(rows)])


def labels(runs: pd.DataFrame, without: Iterable[str] = ()) -> list[str]:
    return label_runs(runs, list(without))["label"].to_list()


def test_a_label_holds_what_was_swept_and_differs() -> None:
    """Not the chunk, which is part of the name; not `b`, which is the same in all; equal runs once."""
    given = ["policy=orca", "chunk=1", "+w.a=0", "b=1"]
    rows = [
        {"overrides": given, "w.a": value, "b": 1, "chunk": chunk} for value, chunk in ((0.5, 1), (2.0, 1), (2.0, 2))
    ]
    assert labels(frame(*rows)) == ["orca, a=0.5", "orca, a=2"]
    assert labels(frame(*rows), ["w.a"]) == ["orca", "orca"]
    text = [{"overrides": ["kind=x"], "kind": kind} for kind in ("x", "y")]
    assert labels(frame(*text)) == ["orca, kind=x", "orca, kind=y"]


def test_runs_are_chosen_by_the_names_of_their_own_folders() -> None:
    runs = frame({}, {})
    assert choose_runs(runs, "1")["folder"].to_list() == ["sweep/a/1"]
    assert len(choose_runs(runs, "")) == 2
    with pytest.raises(ConfigError, match=r"runs=\.: no folder name contains this"):  # no pattern
        choose_runs(runs, ".")
    with pytest.raises(ConfigError, match=r"runs=sweep: no folder name contains this; there are 0, 1 ..."):
        choose_runs(runs, "sweep")


def test_more_runs_than_a_plot_shows_are_refused(sweep: Path) -> None:
    says = (
        "at most 2 runs, the folder holds 3; give the folder of one, or choose with runs=TEXT, a part of folder names"
    )
    with pytest.raises(ConfigError, match=f"this plot shows {says}"):
        load_runs(sweep, "request_level", most=2)
    assert load_runs(sweep, "request_level", most=3)["label"].to_list() == [
        f"request_level, pd_ratio={ratio}" for ratio in (2, 14, 28)
    ]
