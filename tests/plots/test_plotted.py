"""What plots draw - lines, areas, spans, labels - of a run made by hand (`hand_made`)."""

import json
import math
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hand_made import write_run
from matplotlib.axes import Axes
from test_plot_parts import assert_labels_stand_apart

from cbatch import ConfigError
from experiments.plots import attainment, composition, latency_cdf, latency_vs_rate, service, throughput_vs_pd
from experiments.plots.series import load_runs

T1 = 12.7062
"""Standard errors that the interval of a mean of two values reaches to each side."""


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
    assert figure.legends[0].get_title().get_text() == "llama-13b, closed, length 8, batch 4"


@pytest.mark.parametrize("differs", ["", "ttft_seconds", "tbt_seconds", "end_to_end_seconds"])
def test_policies_coincide_where_all_three_latencies_are_equal(tmp_path: Path, differs: str) -> None:
    for value, policy in enumerate(("orca", "sarathi")):
        write_run(
            tmp_path / policy, {"policy": policy}, figures={differs: {"p50": value}} if differs else {}, speed=value
        )
    said = latency_cdf.draw(tmp_path).get_supxlabel()
    assert ("orca and sarathi coincide" in said) is (not differs)


def test_distributions_of_many_values_are_thinned_out_to_quantiles() -> None:
    axes = latency_cdf.new_figure(1, 1, 1)[1][0][0]
    latency_cdf._draw_distribution(axes, (np.arange(5001.0),), "many", 0)
    latency_cdf._draw_distribution(axes, (np.zeros(0),), "none", 1)
    x, y = lines(axes)["many"]
    assert len(x) == 1000 and np.allclose(x, 5000 * np.array(y)) and (y[0], y[-1]) == (0, 1)
    assert lines(axes)["none"] == ([], [])


def test_the_requests_of_all_seeds_are_one_distribution_with_a_band(tmp_path: Path) -> None:
    """The same latencies under two seeds: one line of all six, whose band has no width; four other labels have no band."""
    for seed in (0, 1):
        workload = {"seed": seed, "arrivals": {"rate": 4}}
        write_run(tmp_path / f"{seed}", settings={"seed": seed, "workload": workload}, speed=seed)
    figure = latency_cdf.draw(tmp_path)
    first = figure.axes[0]
    assert figure.legends[0].get_title().get_text() == "llama-13b, closed, batch 4, rate 4 (2 runs per line)"
    [(x, y)] = lines(first).values()
    assert (x, y) == (pytest.approx([2.5, 2.5, 2.75, 2.75, 9.5, 9.5]), pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1]))
    axes = latency_cdf.new_figure(1, 1, 1)[1][0][0]
    latency_cdf._draw_distribution(axes, (np.array([1.0, 3.0]), np.array([2.0, 5.0])), "both", 0)
    assert lines(axes) == {"both": ([1, 2, 3, 5], pytest.approx([0, 1 / 3, 2 / 3, 1]))}
    assert band(axes)[1.0] == (3, 5) and band(axes)[0.0] == (1, 2)


def test_an_axis_of_gaps_ends_before_the_few_longest_and_names_them() -> None:
    """2,000 gaps from 10 to 20 ms with three of 14 s; with a hundred of 14 s these are no exception."""
    for longest, said in ((3, "gaps beyond the axis: at most 0.5% of a line, up to 14 s"), (100, "")):
        panels = latency_cdf.new_figure(1, 3, 1)[1][0]
        gaps = np.concatenate([np.linspace(10, 20, 2000), np.full(longest, 14000.0)])
        for panel in panels:
            latency_cdf._draw_distribution(panel, (gaps,), "one", 0)
        requests = pd.DataFrame({"tier": ["all"], **{name: [0.0] for name, _ in latency_cdf._OBJECTIVES}})
        assert latency_cdf._finish(panels, "", requests) == said
        ends = [panel.get_xlim()[1] for panel in panels]
        assert ends[0] == ends[2] > 14000, "requests that wait are no exception, however few"
        assert (20 < ends[1] < 25) if said else ends[1] > 14000


def test_distributions_of_a_tier(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Request 1 alone has a tier, gold, with a TTFT objective of 4 s: its first token comes after 9.5 s, the next 1 s later."""
    figure = latency_cdf.draw(folder, tiers=True)
    first, between, whole = figure.axes
    assert [lines(axes)["prefill_first"][0] for axes in figure.axes] == [[9.5], [1000], [10.5]]
    [objective] = (points for label, points in lines(first).items() if label.startswith("_"))
    assert objective[0] == [4, 4] and first.get_title(loc="left") == "gold"
    assert all(len(lines(axes)) == 1 for axes in (between, whole)), "no objective for these"
    run = write_run(tmp_path / "run")
    (run / "requests.csv").write_text((run / "requests.csv").read_text().replace("gold", ""))
    with pytest.raises(
        ConfigError, match=r"no request has a tier; give them with workload\.tiers, or leave out tiers=true"
    ):
        latency_cdf.draw(run, tiers=True)


def band(axes: Axes) -> dict[float, tuple[float, float]]:
    """The least and greatest x of a band by its y."""
    [area] = axes.collections
    found: dict[float, list[float]] = {}
    for x, y in area.get_paths()[0].vertices.tolist():
        found.setdefault(y, []).append(x)
    return {y: (min(places), max(places)) for y, places in found.items()}


def test_objectives_of_a_tier_stand_in_the_unit_of_their_panel() -> None:
    """4 s, 50 ms and 9 s; the other tier's are not shown, nor that which its requests do not share."""
    columns = {"slo_ttft_seconds": [4.0, 4.0, 7.0], "slo_tbt_seconds": [0.05, 0.05, 8.0]}
    requests = pd.DataFrame({"tier": ["gold", "gold", "rest"], **columns, "slo_total_seconds": [9.0, 9.0, 9.0]})
    panels = latency_cdf.new_figure(1, 3, 1)[1][0]
    latency_cdf._finish(panels, "gold", requests)
    drawn = [[(line.get_xdata()[0], line.get_linestyle()) for line in axes.get_lines()] for axes in panels]
    assert drawn == [[(4, ":")], [(50, ":")], [(9, ":")]]
    panels = latency_cdf.new_figure(1, 3, 1)[1][0]
    latency_cdf._finish(panels, "gold", requests.assign(slo_ttft_seconds=[4.0, 5.0, 7.0]))
    assert [len(axes.get_lines()) for axes in panels] == [0, 1, 1]


def test_a_latency_that_one_of_several_seeds_has_is_not_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        run = write_run(tmp_path / f"{seed}", settings={"seed": seed}, speed=seed)
    np.savez(run / "tokens.npz", request_id=np.array([0, 1]), time=np.array([1.0, 2.0]))
    assert lines(latency_cdf.draw(tmp_path).axes[1])["prefill_first"][0] == [1000, 2000, 3000]
    assert capsys.readouterr().err == ""


def test_a_latency_that_no_request_has_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    np.savez(tmp_path / "run" / "tokens.npz", request_id=np.array([0, 1]), time=np.array([1.0, 2.0]))
    latency_cdf.draw(tmp_path / "run")
    assert capsys.readouterr().err == "1 run not shown: has no time between tokens\n  prefill_first\n"


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
    about["overrides"] = ["policy=request_level", "workload.pd_ratio=2"]
    write_run(folder / "request_level,ratio=2,z=1", about, {"workload": {"pd_ratio": 2}}, speed=1000)
    return folder


def test_throughput_and_gain_by_ratio(sweep: Path) -> None:
    figure = throughput_vs_pd.draw(sweep)
    speeds, gains = figure.axes
    assert lines(speeds) == {"request_level": ([2, 14, 28], [1, 2, 4]), "orca": ([2, 14], [1.5, 2.5])}
    assert list(lines(speeds)) == ["request_level", "orca"]  # the baseline first
    assert [points[1] for label, points in lines(gains).items() if label.startswith("_")] == [[1, 1]]  # no gain
    by_label = {label: points for label, points in lines(gains).items() if not label.startswith("_")}
    assert by_label == {"request_level": ([2, 14, 28], [1, 1, 1]), "orca": ([2, 14], [1.5, 1.25])}
    assert words(speeds) == ("P:D ratio [prefill / decode tokens]", "throughput [1,000 tokens/s]")
    assert words(gains) == ("P:D ratio [prefill / decode tokens]", "throughput over request_level")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["request_level", "orca"]
    assert speeds.get_ylim()[0] == 0


def test_throughput_of_several_seeds_is_a_mean_with_a_band(tmp_path: Path) -> None:
    """Two seeds at each ratio: 1 and 3, and 4 alone; of the baseline 2 and 2, and 4. The interval of 1 and 3 is 2 ± T1 * 1."""
    for policy, speeds in {"orca": {2: (1000, 3000), 14: (4000,)}, "request_level": {2: (2000,), 14: (4000,)}}.items():
        for ratio, of_seeds in speeds.items():
            for seed, speed in enumerate(of_seeds):
                settings = {"seed": seed, "workload": {"pd_ratio": ratio, "seed": seed}}
                write_run(tmp_path / f"{policy} {ratio} {seed}", {"policy": policy}, settings, speed=speed)
    figure = throughput_vs_pd.draw(tmp_path)
    speeds, gains = figure.axes
    assert lines(speeds) == {"request_level": ([2, 14], [2, 4]), "orca": ([2, 14], [2, 4])}
    assert lines(gains)["orca"] == ([2, 14], [1, 1])
    for axes, widest in ((speeds, (2 - T1, 2 + T1)), (gains, (1 - T1 / 2, 1 + T1 / 2))):
        [area] = axes.collections
        heights = [y for x, y in area.get_paths()[0].vertices.tolist() if x == 2]
        assert (min(heights), max(heights)) == pytest.approx(widest, abs=1e-3)
    assert figure.legends[0].get_title().get_text().endswith("(mean and 95% interval of up to 2 runs per point)")


@pytest.mark.parametrize("ratios", [("2", "5", "14", "28"), ("20", "24", "28")])
def test_the_ratios_are_the_ticks_and_no_text_runs_into_another(tmp_path: Path, ratios: tuple[str, ...]) -> None:
    for ratio in map(int, ratios):
        about = {"policy": "request_level_with_a_long_name_and_settings"}
        write_run(tmp_path / f"{ratio}", about, {"workload": {"lengths": {"pd_ratio": ratio}}}, speed=ratio)
    figure = throughput_vs_pd.draw(tmp_path, baseline=about["policy"])
    figure.draw_without_rendering()
    for axes in figure.axes:
        labelled = [tick.get_text() for tick in axes.get_xticklabels()]
        assert labelled == list(ratios)
        assert_labels_stand_apart(axes)
        label, title = axes.yaxis.label.get_window_extent(), figure.legends[0].get_window_extent()
        assert label.y0 >= 0 and label.y1 <= title.y0


def test_a_run_without_the_ratio_or_the_throughput_is_named(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ratio, speed in ((2, 1000), (14, 2000)):
        write_run(tmp_path / f"ratio={ratio}", {}, {"workload": {"pd_ratio": ratio}}, speed=speed)
    write_run(tmp_path / "other", {}, {"workload": {"path": "a.csv"}})
    write_run(tmp_path / "empty", {}, {"workload": {"pd_ratio": 5}}, speed=float("nan"))
    [axes] = throughput_vs_pd.draw(tmp_path).axes
    assert lines(axes) == {"prefill_first": ([2, 14], [1, 2])}
    assert capsys.readouterr().err.splitlines() == [
        *("1 run not shown: has no workload.pd_ratio", "  other"),
        *("1 run not shown: has no throughput.total_tokens_per_second", "  empty"),
    ]


# -- latency against the request rate ---------------------------------------------------------------------------------


def write_rates(folder: Path, key: str, values: Iterable[float]) -> Path:
    """At each value TTFT of 0.1 and TBT of 0.01 times the value, of P99 ten times as much; with seed 1 twice that."""
    for value in values:
        for seed in (0, 1):
            workload: dict[str, Any] = {"arrivals": {"rate": value}} if key == "rate" else {key: value}
            figures = {
                f"{name}_seconds": {"p50": unit * value * (1 + seed), "p99": 10 * unit * value * (1 + seed)}
                for name, unit in (("ttft", 0.1), ("tbt", 0.01))
            }
            settings = {"seed": seed, "workload": {"seed": seed, **workload}}
            write_run(folder / f"{value},{seed}", settings=settings, figures=figures)
    return folder


def test_latencies_against_the_rate_are_means_with_bands(tmp_path: Path) -> None:
    figure = latency_vs_rate.draw(write_rates(tmp_path, "rate", (1, 4)))
    units = {"TTFT P50 [s]": 0.1, "TBT P50 [ms]": 10, "TTFT P99 [s]": 1, "TBT P99 [ms]": 100}
    assert [axes.get_ylabel() for axes in figure.axes] == list(units)
    for axes, unit in zip(figure.axes, units.values(), strict=True):
        assert lines(axes) == {"prefill_first": ([1, 4], pytest.approx([1.5 * unit, 6 * unit]))}
        heights = sorted({(x, round(y / unit, 3)) for x, y in axes.collections[0].get_paths()[0].vertices.tolist()})
        factor = math.exp(T1 / 3)  # errors of 0.5 and 2 of means of 1.5 and 6
        assert [y for _, y in heights] == pytest.approx([1.5 / factor, 1.5 * factor, 6 / factor, 6 * factor], rel=0.02)
        assert [x for x, _ in heights] == [1, 1, 4, 4]
        assert axes.get_yscale() == "log" and axes.get_xlim()[0] == 0
        labelled = [tick for tick in axes.get_yticks() if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]]
        assert len(labelled) >= 2 and axes.yaxis.get_major_formatter()(0.5) == "0.5"
        assert axes.get_shared_x_axes().joined(axes, figure.axes[0])
    assert [axes.get_xlabel() for axes in figure.axes[2:]] == ["request rate [requests/s]"] * 2
    title = figure.legends[0].get_title().get_text()
    assert title == "llama-13b, closed, batch 4 (mean and 95% interval of 2 runs per point)"
    [top, _] = latency_vs_rate.draw(tmp_path, percentiles=(99,), runs=",0").axes
    assert lines(top) == {"prefill_first": ([1, 4], pytest.approx([1, 4]))} and not top.collections


def test_the_rate_of_a_trace_is_that_of_its_requests(tmp_path: Path) -> None:
    """Four requests arrive from 0.25 to 5.5 s in every run: the plot has one rate, 3 / 5.25 per second, at both speeds."""
    axes = latency_vs_rate.draw(write_rates(tmp_path, "speed", (1, 2))).axes[0]
    assert lines(axes) == {"prefill_first": ([pytest.approx(3 / 5.25)], pytest.approx([0.225]))}


def test_workloads_are_rows_and_their_arguments_are_no_series(tmp_path: Path) -> None:
    """Rates of one workload are set, those of the other come from its speed: one line each, in a row of panels of its own."""
    for workload, key, values in (("open_loop", "arrivals", (1, 4)), ("azure", "speed", (1, 2))):
        for value in values:
            settings = {"workload": {key: {"rate": value} if key == "arrivals" else value}}
            figures = {f"{name}_seconds": {"p50": value, "p99": value} for name in ("ttft", "tbt")}
            write_run(tmp_path / f"{workload} {value}", {"workload": f"{workload}({value})"}, settings, figures=figures)
    trace, set_rate = latency_vs_rate.draw(tmp_path, percentiles=(50,)).axes[::2]
    assert (trace.get_title(loc="left"), set_rate.get_title(loc="left")) == ("azure", "open_loop")
    assert lines(set_rate) == {"prefill_first": ([1, 4], [1, 4])}
    assert lines(trace) == {"prefill_first": ([pytest.approx(3 / 5.25)], [1.5])}
    assert not trace.get_shared_x_axes().joined(trace, set_rate)  # their rates are others
    trace, set_rate = attainment.draw(tmp_path).axes  # side by side, as there is one tier at most
    assert [axes.get_title(loc="left") for axes in (trace, set_rate)] == [
        "azure: all requests",
        "open_loop: all requests",
    ]
    assert lines(set_rate)["prefill_first"] == ([1, 4], [0, 0])
    assert trace.get_subplotspec().rowspan == set_rate.get_subplotspec().rowspan  # type: ignore[union-attr]


# -- attainment against the request rate ------------------------------------------------------------------------------


def attained(folder: Path, rate: float, seed: int, policy: str = "orca", **shares: object) -> None:
    """A run whose requests attained these shares of their objectives."""
    settings = {"seed": seed, "workload": {"arrivals": {"rate": rate}}}
    write_run(folder / f"{policy} {rate} {seed}", {"policy": policy}, settings, figures={"attainment": shares})


def test_attainment_against_the_rate_for_all_requests_and_each_tier(tmp_path: Path) -> None:
    for rate in (1, 4):
        for seed in (0, 1):
            tiers = {"gold": {"share": 1 / rate}, "rest": {"share": 1.0, "ttft_share": 0.25}}
            attained(
                tmp_path, rate, seed, share=(0.9 + 0.1 * seed) / rate, ttft_share=0.5, total_share=0.25, tiers=tiers
            )
    attained(tmp_path, 1, 0, "sarathi", share=0.75, tiers={})
    figure = attainment.draw(tmp_path, goal=0.8)
    whole, gold, rest = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["all requests", "gold", "rest"]
    drawn = {label: points for label, points in lines(whole).items() if not label.startswith("goal")}
    assert drawn == {"orca": ([1, 4], pytest.approx([0.95, 0.95 / 4])), "sarathi": ([1], [0.75])}
    heights = sorted(y for _, y in whole.collections[0].get_paths()[0].vertices.tolist())
    ends = [mean + sign * T1 * error for mean, error in ((0.95, 0.05), (0.2375, 0.0125)) for sign in (-1, 1)]
    assert max(ends) > 1 and (heights[0], heights[-1]) == pytest.approx((min(ends), 1.0), abs=1e-3)
    assert lines(gold)["orca"] == ([1, 4], [1, 0.25]) and lines(gold)["sarathi"] == ([], [])
    assert lines(rest)["goal: 80%"][1] == [0.8, 0.8]
    assert words(whole) == ("request rate [requests/s]", "attainment") and whole.get_ylim() == (-0.06, 1.06)
    assert whole.yaxis.get_major_formatter()(0.5) == "50%"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["orca", "sarathi", "goal: 80%"]
    assert figure.legends[0].get_title().get_text().startswith("llama-13b")
    with pytest.raises(ConfigError, match=r"goal=1\.5: give a share above 0, at most 1"):
        attainment.draw(tmp_path, goal=1.5)
    figure = attainment.draw(tmp_path, objective="ttft", runs="orca")  # one tier has this objective
    [only] = figure.axes
    assert (lines(only)["orca"][1], only.get_title(loc="left")) == ([0.5, 0.5], "all requests")
    assert figure.legends[0].get_title().get_text().startswith("Objective ttft")
    [only] = attainment.draw(tmp_path, objective="total", runs="orca").axes
    assert lines(only)["orca"][1] == [0.25, 0.25]
    assert [axes.yaxis.get_tick_params()["labelleft"] for axes in (whole, gold, rest)] == [True, False, False]


def test_many_distributions_have_panels_as_wide_as_the_page(tmp_path: Path) -> None:
    """Markers of equal lines lie at different places, so that all are seen."""
    for policy in range(9):
        write_run(tmp_path / f"{policy}", {"policy": f"p{policy}"})
        if policy == 7:
            assert len({axes.get_position().y0 for axes in latency_cdf.draw(tmp_path).axes}) == 1
    panels = latency_cdf.draw(tmp_path).axes
    assert len({axes.get_position().x0 for axes in panels}) == 1 < len({axes.get_position().y0 for axes in panels})
    assert {axes.get_ylabel() for axes in panels} == {"share of requests, or of gaps"}


def test_tiers_stand_as_declared_and_those_that_show_nothing_are_named_below(tmp_path: Path) -> None:
    shares = {"rest": (1.0, 1.0), "gold": (1.0, 0.5), "basic": (0.25, 0.5)}  # in a summary the order is another
    for place, rate in enumerate((1, 4)):
        tiers = {name: {"share": each[place]} for name, each in shares.items()}
        declared = {name: {"share": 0.3} for name in shares}
        figures = {"attainment": {"share": 0.5, "tiers": dict(sorted(tiers.items()))}}
        settings = {"workload": {"arrivals": {"rate": rate}, "tiers": declared}}
        write_run(tmp_path / f"{rate}", settings=settings, figures=figures)
    figure = attainment.draw(tmp_path)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["all requests", "gold", "basic"]
    assert "rest: 100% in each run" in figure.get_supxlabel().splitlines()


def test_policies_of_equal_attainment_are_named(tmp_path: Path) -> None:
    for policy, rate in product(("orca", "sarathi"), (1, 2)):
        attained(tmp_path, rate, 0, policy, share=1 / rate, tiers={})
    assert "orca and sarathi coincide" in attainment.draw(tmp_path).get_supxlabel()


def test_objectives_of_the_run_count_where_requests_have_none(tmp_path: Path) -> None:
    for rate in (1, 2):
        run = write_run(tmp_path / f"{rate}", settings={"workload": {"arrivals": {"rate": rate}}})
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps({**summary, "attainment": {}}))
    [axes] = attainment.draw(tmp_path).axes
    assert lines(axes)["prefill_first"] == ([1, 2], [0.5, 0.5])
    says = "no run has this objective; give the requests objectives with workload.slo or workload.tiers"
    with pytest.raises(ConfigError, match=f"{says}$"):
        attainment.draw(tmp_path, objective="tbt")
    for run in tmp_path.iterdir():
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps({**summary, "goodput": {}}))
    with pytest.raises(ConfigError, match=f"{says}, or metrics.objectives$"):
        attainment.draw(tmp_path)


# -- service over time ------------------------------------------------------------------------------------------------


def test_service_of_clients_over_time(folder: Path) -> None:
    """Ann's request of 7 + 2 * 2 is served from 11 to 12 s; the others', of 5 + 2 * 3 from 3 to 8 s and 3 + 2 at 8 s.

    Ann's weight is 2.
    """
    total, rate, unfair = service.draw(folder, window=2.0).axes
    assert list(lines(total)) == ["no client", "ann"]  # by the service received
    for name, expected in (
        ("ann", {10.9: 0, 11.5: 5.5, 12.0: 11}),
        ("no client", {2.9: 0, 5.5: 5.5, 7.9: 10.78, 8.1: 16}),
    ):
        x, y = lines(total)[name]
        assert np.interp(list(expected), x, y) == pytest.approx([each / 1e3 for each in expected.values()], abs=2e-4)
    x, y = lines(rate)["no client"]
    assert (x[0], x[-1]) == (0.25, 12.0)
    assert np.interp([1.0, 3.0, 5.5], x, y) == pytest.approx([0, 1.1, 2.2], abs=0.03)
    # 19 windows of 2 s around 1.225 to 5.275 s: the last ones receive 2.2 per second, of which ann wants nothing yet
    [(middle, difference)] = lines(unfair).values()
    assert middle == pytest.approx([1 + 0.225 * tick for tick in range(1, 20)])
    assert difference[-1] == pytest.approx(0)
    assert words(unfair) == ("time [s]", "service difference\n[per s]")
    assert all(
        axes.get_ylim()[0] == 0 and axes.get_shared_x_axes().joined(axes, total) for axes in (total, rate, unfair)
    )
    assert total.get_ylabel() == "service received\n[thousands]"


def test_service_is_drawn_over_the_clients_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"workload": {"length": 8}, "metrics": {"client_weights": {"ann": 2.0}}}
    total, rate, _ = service.draw(write_run(tmp_path / "run", settings=settings)).axes
    assert lines(total)["ann"][1][-1] == pytest.approx(11 / 2 / 1e3)
    assert (total.get_ylabel(), rate.get_ylabel()) == (
        "service / weight received\n[thousands]",
        "service / weight rate\n[per s]",
    )
    assert "has no service difference: its arrivals span less than window=60 s" in capsys.readouterr().err


def test_service_needs_clients(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    text = (run / "requests.csv").read_text()
    (run / "requests.csv").write_text(text.replace("ann", ""))
    with pytest.raises(ConfigError, match=r"run: no request names its client; choose a workload with clients"):
        service.draw(run)
    with pytest.raises(ConfigError, match=r"window=0: give seconds above 0"):
        service.draw(run, window=0)
    write_run(tmp_path / "other", speed=1)
    with pytest.raises(ConfigError, match=r"this plot shows one run, the folder holds 2"):
        service.draw(tmp_path)


def test_of_many_clients_the_smallest_are_grey(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(service, "_MOST_CLIENTS", 1)
    total = service.draw(folder, window=2.0).axes[0]
    labels = [str(line.get_label()) for line in total.get_lines()]
    assert [label for label in labels if not label.startswith("_")] == ["2 others"]
    assert [line.get_xdata()[-1] for line in total.get_lines()] == [12, 12]
    three: Any = SimpleNamespace(
        weight=np.ones(3), clients=["a", "b", "c"], received=lambda at: np.array([[1.0, 3.0, 2.0]])
    )
    panel = service.new_figure(1, 1, 1)[1][0][0]
    service._draw_clients(panel, np.arange(2), np.ones((2, 3)), three)
    labels = [str(line.get_label()) for line in panel.get_lines()]
    assert [label for label in labels if not label.startswith("_")] == ["3 others"], "named once"


def test_throughput_needs_several_ratios(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"pd_ratio; sweep it with -m workload\..*pd_ratio=2,5,14,28") as caught:
        throughput_vs_pd.draw(folder)
    assert str(caught.value).startswith(f"{folder}: needs runs with several values of ")


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


def test_more_runs_than_a_plot_shows_are_refused(sweep: Path) -> None:
    says = (
        "at most 2 runs, the folder holds 3; give the folder of one, or choose with runs=TEXT, a part of folder names"
    )
    with pytest.raises(ConfigError, match=f"this plot shows {says}"):
        load_runs(sweep, "request_level", most=2)
    assert load_runs(sweep, "request_level", most=3)["label"].to_list() == [
        f"request_level, pd_ratio={ratio}" for ratio in (2, 14, 28)
    ]
