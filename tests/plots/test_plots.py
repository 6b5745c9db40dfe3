"""`experiments.plot`: what is on the axes is what is in the results; each plot is drawn and written."""

import math
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hand_made import write_run
from matplotlib.axes import Axes
from test_schedule_chart import with_decisions

from cbatch import ConfigError
from experiments.api import simulate
from experiments.compare import pairs_of, read_replications
from experiments.plot import NAMES, main
from experiments.plots import composition, curves, latency_cdf, service
from experiments.plots.parts import label_log
from experiments.plots.style import Look, new_figure

T1 = 12.7062
"""Standard errors that the interval of a mean of two values reaches to each side."""

SPEED = "throughput.total_tokens_per_second"
Points = tuple[list[float], list[float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("drawn") / "run")


def lines(axes: Axes) -> dict[str, Points]:
    """Returns x and y of each line, by its label."""
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def band(axes: Axes, x: float) -> tuple[float, float]:
    """Returns the ends of a band at x."""
    [area] = axes.collections
    heights = [y for place, y in area.get_paths()[0].vertices.tolist() if place == x]
    return min(heights), max(heights)


# -- curves -----------------------------------------------------------------------------------------------------------


def write_ratios(folder: Path, speeds: dict[str, dict[int, tuple[float, ...]]]) -> Path:
    """Writes runs of tokens per second by policy and P:D ratio, one for each seed."""
    for policy, by_ratio in speeds.items():
        for ratio, seed in ((ratio, seed) for ratio, of_seeds in by_ratio.items() for seed in range(len(of_seeds))):
            settings = {"seed": seed, "workload": {"pd_ratio": ratio, "seed": seed}}
            about = {"policy": policy, "overrides": [f"policy={policy}"]}
            write_run(folder / f"{policy},ratio={ratio},{seed}", about, settings, speed=by_ratio[ratio][seed])
    return folder


def test_throughput_and_its_gain_against_the_ratio(tmp_path: Path) -> None:
    """Two seeds at one point: 1 and 3; the baseline comes first, and has more ratios."""
    baseline = {2: (2000.0,), 14: (4000.0,), 28: (8000.0,)}
    folder = write_ratios(tmp_path, {"orca": {14: (5000.0,), 2: (1000.0, 3000.0)}, "request_level": baseline})
    speeds, gains = curves.throughput_vs_pd(folder).axes
    assert list(lines(speeds).items()) == [
        ("request_level", ([2, 14, 28], [2000, 4000, 8000])),
        ("orca", ([2, 14], [2000, 5000])),
    ]
    assert lines(gains)["orca"] == ([2, 14], [1, 1.25]) and lines(gains)["request_level"][1] == [1, 1, 1]
    assert band(speeds, 2) == pytest.approx((2000 - T1 * 1000, 2000 + T1 * 1000), abs=1)
    assert not gains.collections, "one run of the baseline has no pairs"
    speeds, _ = curves.throughput_vs_pd(folder, Look(order=["orca"])).axes
    assert list(lines(speeds)) == ["orca", "request_level"]
    _, gains = curves.draw(folder, x="workload.pd_ratio", y=(SPEED,), baseline="orca").axes
    assert (gains.get_xlabel(), gains.get_ylabel()) == (speeds.get_xlabel(), "throughput over orca")
    with pytest.raises(ConfigError, match=r"baseline=orka: no run of this policy; did you mean orca\?"):
        curves.throughput_vs_pd(folder, baseline="orka")


def test_the_band_of_a_ratio_is_the_interval_of_compare(tmp_path: Path) -> None:
    """Relative to their means, the speeds of the two seeds differ by -1/6 and 1/6; at 14, the policies share no seed."""
    unknown = math.nan
    baseline = {2: (2000.0, 4000.0), 14: (2000.0, 4000.0, unknown, unknown)}
    write_ratios(tmp_path, {"request_level": baseline, "orca": {2: (1000.0, 3000.0), 14: (unknown, unknown, 5.0, 7.0)}})
    _, gains = curves.throughput_vs_pd(tmp_path).axes
    assert lines(gains)["request_level"][1] == [1, 1]
    assert lines(gains)["orca"][1] == pytest.approx([2 / 3, 6 / 3000])
    [pair] = pairs_of(read_replications([tmp_path], "ratio=2,"), [SPEED], "request_level")
    assert band(gains, 2) == pytest.approx(pair.results[SPEED].ratio[1:])
    assert band(gains, 2) == pytest.approx((2 / 3 / math.exp(T1 / 6), 2 / 3 * math.exp(T1 / 6)), rel=1e-5)
    area = gains.collections[0].get_paths()
    assert {x for path in area for x, _ in path.vertices.tolist()} == {2}, "unpaired runs have no band"


def test_runs_without_the_ratio_or_the_throughput_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ratios(tmp_path, {"orca": {2: (1000.0,), 14: (2000.0,), 5: (math.nan,)}})
    write_run(tmp_path / "other", {"policy": "orca"}, {"workload": {"path": "a.csv"}})
    [axes] = curves.throughput_vs_pd(tmp_path).axes
    assert lines(axes) == {"orca": ([2, 14], [1000, 2000])}
    complaint = capsys.readouterr().err
    assert "no gain is drawn: there is no run of request_level" in complaint
    assert "has no pd\n  other" in complaint and f"has no {SPEED}\n  orca,ratio=5,0" in complaint


def test_a_figure_and_its_ratio_share_a_row_and_no_panel_is_empty(tmp_path: Path) -> None:
    """Nothing is a multiple of a baseline's 0 tokens per second; the other figures are equal in all runs."""
    write_ratios(tmp_path, {policy: {2: (0.0,), 14: (0.0,)} for policy in ("orca", "vtc")})
    keys = ("run.preemptions", SPEED, "run.iterations")
    panels = curves.draw(tmp_path, x="workload.pd_ratio", y=keys, baseline="orca").axes
    assert [panel.axison for panel in panels] == [True, True, True, False, True, True]
    columns = [panel.get_subplotspec().colspan.start for panel in panels]
    assert columns == [0, 1] * 3


@pytest.mark.parametrize(("order", "label"), [([], "vtc = orca"), (["orca"], "orca = vtc")])
def test_equal_lines_are_one_also_with_the_baseline_among_them(order: list[str], label: str, tmp_path: Path) -> None:
    folder = write_ratios(
        tmp_path, {"orca": {2: (1.0,), 14: (2.0,)}, "vtc": {2: (1.0,), 14: (2.0,)}, "mlfq": {2: (3.0,), 14: (4.0,)}}
    )
    figure = curves.throughput_vs_pd(folder, Look(order=order), baseline="vtc")
    speeds, gains = figure.axes
    assert lines(speeds) == {label: ([2, 14], [1, 2]), "mlfq": ([2, 14], [3, 4])}
    assert lines(gains)["mlfq"] == ([2, 14], [3, 2]) and gains.get_ylabel() == f"throughput over {label.split()[0]}"
    assert {*lines(latency_cdf.draw(folder, Look(runs="ratio=2")).axes[0])} == {"mlfq = orca = vtc"}, "equal latencies"


def test_any_figure_against_any_setting(tmp_path: Path) -> None:
    for batch in (4, 8):
        write_run(tmp_path / f"{batch}", settings={"batch": batch}, speed=100.0 * batch)
    figure = curves.draw(tmp_path, x="batch", y=(SPEED, "run.preempt*", "run.iterations"))
    speeds, iterations = figure.axes
    assert lines(speeds) == {"prefill_first": ([4, 8], [400, 800])}
    assert lines(iterations) == {"prefill_first": ([4, 8], [5, 5])}
    assert "preemptions: 1 in each run" in figure.get_supxlabel()


def test_a_policy_that_does_not_read_x_is_a_level_line_without_markers(tmp_path: Path) -> None:
    """Orca was measured twice, with speeds of 1 and 3; the pairs of these runs and Sarathi's cannot be known."""
    for number, (policy, chunk, speed) in enumerate(
        [("orca", None, 1), ("orca", None, 3), ("sarathi", 1, 4), ("sarathi", 5, 6)]
    ):
        settings = {"policy": {"chunk": chunk}} if chunk else {}
        write_run(tmp_path / f"{number}", {"policy": policy, "chunk": chunk}, settings, speed=speed)
    for key in ("chunk", "policy.chunk"):
        figure = curves.draw(tmp_path, x=key, y=(SPEED,), baseline="orca")
        speeds, gains = figure.axes
        assert lines(speeds) == {"orca": ([1, 5], [2, 2]), "sarathi": ([1, 5], [4, 6])}
        assert lines(gains)["sarathi"] == ([1, 5], [2, 3]) and band(speeds, 5) == pytest.approx((2 - T1, 2 + T1))
        assert [line.get_marker() for line in speeds.get_lines()] == ["", "s"]
        assert f"orca: independent of {key}, drawn as a level line" in figure.get_supxlabel().splitlines()


def test_evictions_are_labelled_by_what_varies_and_belady_is_a_reference(tmp_path: Path) -> None:
    for eviction, tokens in product(("belady", "lru"), (20000, 80000)):
        found = {"hit_share": tokens / 100000 - 0.1 * (eviction == "lru")}
        settings = {"kv_tokens": tokens, "eviction": eviction}
        write_run(tmp_path / f"{eviction}{tokens}", settings=settings, figures={"prefix_cache": found})
    figure = curves.draw(tmp_path, x="kv_tokens", y=("prefix_cache.hit_share",))
    [panel] = figure.axes
    best, lru = panel.get_lines()
    assert (best.get_label(), best.get_linestyle()) == ("eviction=belady (reads the future)", "--")
    assert (lru.get_label(), list(lru.get_ydata())) == ("eviction=lru", [pytest.approx(10), pytest.approx(70)])
    assert panel.get_xlabel() == "size of the KV cache [tokens] (log)" and list(panel.get_xticks()) == [20000, 80000]
    assert figure.legends[0].get_title().get_text().startswith("prefill_first: ")
    for share in (0.1, 0.2):
        settings = {
            "kv_tokens": 20000,
            "eviction": "lfu",
            "share": share,
            "backend": {"replicas": 2, "router": "mine.R"},
        }
        write_run(tmp_path / f"share={share}", settings=settings)
    title = composition.draw(tmp_path, Look(runs="share=0.2")).get_suptitle().replace("\n", " ")
    assert title.startswith("prefill_first: llama-13b, closed, batches of at most 4, 0.571 requests/s, ")
    assert ", KV cache of 20,000 tokens, eviction lfu, 2 replicas, router R, share=0.2 (" in title


def test_a_rate_that_chose_the_runs_is_stated_once(tmp_path: Path) -> None:
    """As measured; a chosen setting that is no rate follows."""
    for rate, share in ((4, 1), (40, 1), (40, 2)):
        settings = {"workload": {"arrivals": {"rate": rate}}, "share": share}
        write_run(tmp_path / f"rate={rate},share={share}", settings=settings)
    title = latency_cdf.draw(tmp_path, Look(runs="rate=40,share=2")).legends[0].get_title().get_text()
    assert "0.571 requests/s" in title and "rate=" not in title and "share=2" in title


def test_the_price_behind_a_cost_stands_below(tmp_path: Path) -> None:
    for batch, price in ((4, 2.5), (8, 10.0)):
        cost = {"dollars_per_hour": price, "dollars_per_million_tokens": 1.0}
        write_run(tmp_path / str(batch), settings={"batch": batch}, figures={"cost": cost})
    cost = curves.draw(tmp_path, x="batch", y=("cost.dollars_per_million_tokens",)).get_supxlabel()
    speed = curves.draw(tmp_path, x="batch", y=(SPEED,)).get_supxlabel()
    assert "at $2.5 to $10/h for all GPUs" in cost and "$" not in speed


def write_rates(folder: Path, key: str, values: Iterable[float], workload: str = "open_loop") -> Path:
    """At each value TTFT of 0.1 and TBT of 0.01 times the value, of P99 ten times as much; with seed 1 twice that.

    Requests arrive at 7 times the value with seed 0 and at 9 times the value with seed 1, as conversations of 8 turns may.
    """
    for value, seed in product(values, (0, 1)):
        section: dict[str, Any] = {"arrivals": {"rate": value}} if key == "rate" else {key: value}
        figures = {
            f"{name}_seconds": {"p50": unit * value * (1 + seed), "p99": 10 * unit * value * (1 + seed)}
            for name, unit in (("ttft", 0.1), ("tbt", 0.01))
        }
        figures["run"] = {"offered_requests_per_second": (7 + 2 * seed) * value}
        settings, about = {"seed": seed, "workload": {"seed": seed, **section}}, {"workload": f"{workload}({value})"}
        write_run(folder / f"{workload},{value},{seed}", about, settings, figures=figures)
    return folder


def test_latencies_against_the_rate_are_means_with_bands(tmp_path: Path) -> None:
    panels = curves.latency_vs_rate(write_rates(tmp_path, "rate", (1, 4))).axes
    for axes, unit in zip(panels, (0.1, 10, 1, 100), strict=True):
        assert lines(axes) == {"prefill_first": ([8, 32], pytest.approx([1.5 * unit, 6 * unit]))}
        assert band(axes, 32) == pytest.approx(((6 - 2 * T1) * unit, (6 + 2 * T1) * unit), rel=1e-3)
        assert axes.get_yscale() == "log" and 0.5 * unit < axes.get_ylim()[0] < 1.5 * unit


def test_limits_and_scales_of_axes_are_the_users(tmp_path: Path) -> None:
    """Logarithmic by the user's will over any range; a label that was logarithmic loses the word."""
    folder = write_rates(tmp_path, "rate", (1, 4))
    [ttft, _] = curves.latency_vs_rate(folder, Look(xlim=(1, 99), xscale="log", yscale="linear"), (50,)).axes
    assert ttft.get_yscale() == "linear" and ttft.get_ylabel() == "TTFT p50 [s]"
    assert ttft.get_xscale() == "log" and ttft.get_xlim()[1] == 99 and ttft.get_xlabel().endswith("(log)")
    [panel, _] = curves.latency_vs_rate(folder, Look(ylim=(0.5, 7)), (50,)).axes
    assert panel.get_ylim() == (0.5, 7)


def test_a_narrow_range_has_a_linear_axis_from_0_with_room_for_its_markers(tmp_path: Path) -> None:
    """TTFT of 1.2 to 1.35 s, with bands to 7.6 s and below 0, and P:D ratios of 8 to 9."""
    [ttft, _] = curves.latency_vs_rate(write_rates(tmp_path / "rates", "rate", (8, 9)), percentiles=(50,)).axes
    assert ttft.get_yscale() == "linear"
    for pd_ratio in (8, 9):
        settings = {"workload": {"pd_ratio": pd_ratio}}
        write_run(tmp_path / "ratios" / f"{pd_ratio}", settings=settings, speed=100.0 * pd_ratio)
    [speed] = curves.throughput_vs_pd(tmp_path / "ratios").axes
    assert speed.get_xscale() == "linear" and "log" not in speed.get_xlabel()
    assert speed.get_ylim() == (0, pytest.approx(1.05 * 900))


@pytest.mark.long
def test_the_rate_on_the_axis_is_measured_whatever_the_setting_means(tmp_path: Path) -> None:
    """Eight requests per conversation, or per second of the trace's speed; as a setting, its own value. A title has the mean of the seeds."""
    write_rates(tmp_path, "rate", (1, 4))
    write_rates(tmp_path, "speed", (1, 2), "azure")
    trace, rate = curves.latency_vs_rate(tmp_path, percentiles=(50,)).axes[::2]
    assert lines(trace) == {"prefill_first": ([8, 16], pytest.approx([0.15, 0.3]))}
    assert lines(rate)["prefill_first"][0] == [8, 32] and rate.get_xlabel() == "offered rate [requests/s]"
    assert [axes.get_title(loc="left") for axes in (trace, rate)] == ["azure", "open_loop"]
    key = "workload.arrivals.rate"
    setting = curves.draw(tmp_path, Look(runs="open"), x=key, y=("ttft_seconds.p50",)).axes[0]
    assert (lines(setting)["prefill_first"][0], setting.get_xlabel()) == ([1, 4], key)
    figure = latency_cdf.draw(tmp_path, Look(runs="open_loop,4"))
    assert "open_loop(4), batches of at most 4, 32 requests/s" in figure.legends[0].get_title().get_text()
    assert "requests/s" not in latency_cdf.draw(tmp_path, Look(runs="open")).legends[0].get_title().get_text()


def test_attainment_of_all_requests_and_of_each_tier(tmp_path: Path) -> None:
    """The tier `rest` attains all in each run, which is stated below."""
    for rate, seed in product((1, 4), (0, 1)):
        tiers = {"gold": {"share": 1 / rate}, "rest": {"share": 1.0}}
        figures: dict[str, Any] = {"run": {"offered_requests_per_second": rate}}
        figures |= {"attainment": {"share": (0.9 + 0.1 * seed) / rate, "ttft_share": 0.5, "tiers": tiers}}
        write_run(
            tmp_path / f"{rate} {seed}",
            settings={"seed": seed, "workload": {"arrivals": {"rate": rate}}},
            figures=figures,
        )
    figure = curves.attainment(tmp_path, goal=0.8)
    whole, gold = figure.axes
    assert lines(whole)["prefill_first"] == ([1, 4], pytest.approx([95, 95 / 4]))
    assert lines(gold)["prefill_first"] == ([1, 4], [100, 25])
    assert lines(gold)["goal: 80%"][1] == [80, 80]
    assert band(whole, 1)[1] == pytest.approx(95 + 5 * T1, rel=1e-4) and whole.get_ylim() == (0, 100)
    assert "rest attained [%]: 100 in each run" in figure.get_supxlabel().splitlines()
    for run in tmp_path.iterdir():
        (run / "summary.json").write_text((run / "summary.json").read_text().replace('"share"', '"no_share"'))
    [of_objectives] = curves.attainment(tmp_path).axes
    assert lines(of_objectives)["prefill_first"][1] == [50, 50], "objectives of the run, as requests have none"
    with pytest.raises(ConfigError, match=r"no run has attainment\.total_share"):
        curves.draw(tmp_path, Look(runs="1 0|4 0"), x="rate", y=("attainment.total_share",))
    for run in tmp_path.iterdir():
        (run / "summary.json").write_text((run / "summary.json").read_text().replace('"attained_share"', '"no_share"'))
    with pytest.raises(ConfigError, match=r"no request has objectives; run it again with 'workload\.slo="):
        curves.attainment(tmp_path)


# -- distributions ----------------------------------------------------------------------------------------------------


def test_distributions_of_what_a_client_sees(folder: Path) -> None:
    first, between, whole = latency_cdf.draw(folder).axes
    thirds = pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert lines(first) == {"prefill_first": ([2.5, 2.5, 2.75, 9.5], thirds)}
    assert lines(between) == {"prefill_first": ([1000, 1000, 2000, 3000], thirds)}
    assert lines(whole) == {"prefill_first": ([2.5, 2.5, 7.75, 10.5], thirds)}


def test_distributions_of_a_tier_with_its_objective(folder: Path, tmp_path: Path) -> None:
    """Request 1 alone has a tier, gold, with a TTFT objective of 4 s: its first token comes after 9.5 s, the next 1 s later."""
    panels = latency_cdf.draw(folder, tiers=True).axes
    assert [lines(axes)["prefill_first"][0] for axes in panels] == [[9.5] * 2, [1000] * 2, [10.5] * 2]
    assert [[x for label, (x, _) in lines(axes).items() if label.startswith("_")] for axes in panels] == [
        [[4, 4]],
        [],
        [],
    ]
    run = write_run(tmp_path / "run")
    (run / "requests.csv").write_text((run / "requests.csv").read_text().replace("gold", ""))
    with pytest.raises(ConfigError, match="no request has a tier"):
        latency_cdf.draw(run, tiers=True)


def test_seeds_are_pooled_with_a_band_of_the_single_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second run has one gap of 1 s, the first of 1, 2 and 3 s; then none has a gap, which is said."""
    for seed in (0, 1):
        run = write_run(tmp_path / f"{seed}", settings={"seed": seed}, speed=seed)
    np.savez(run / "tokens.npz", request_id=np.array([0, 0]), time=np.array([1.0, 2.0]))
    panel = latency_cdf.draw(tmp_path).axes[1]
    assert lines(panel)["prefill_first"][0] == [1000, 1000, 1000, 2000, 3000]
    [area] = panel.collections
    assert {x for x, y in area.get_paths()[0].vertices.tolist() if y == 1} == {1000, 3000}
    np.savez(run / "tokens.npz", request_id=np.array([0, 1]), time=np.array([1.0, 2.0]))
    latency_cdf.draw(run)
    assert capsys.readouterr().err == "1 run not shown: has no time between tokens\n  prefill_first\n"


# -- one run over time ------------------------------------------------------------------------------------------------


def test_composition_of_iterations_over_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, requests, memory = composition.draw(folder).axes
    started = [1.25, 3.5, 6.0, 8.5, 11.5]
    assert [area.get_label() for area in tokens.collections] == ["decode", "prefill", "padding"]
    tops = [max(y for x, y in area.get_paths()[0].vertices if x == 8.5) for area in tokens.collections]
    assert tops == [1, 7, 8]
    assert lines(requests) == {"running": (started, [1, 2, 0, 1, 0]), "waiting": (started, [1, 0, 1, 0, 0])}
    [(_, used)] = lines(memory).values()
    assert used == pytest.approx([10, 25, 30, 15, 15])
    monkeypatch.setattr(composition, "_MOST_STEPS", 4)  # means of the first three iterations, and of two
    means = lines(composition.draw(folder).axes[1])
    assert means["running"] == ([1.25, 8.5], [1.0, 0.5])


def test_composition_has_a_column_for_each_replica(tmp_path: Path) -> None:
    """Replica 0 computes the first two iterations, replica 2 the others, replica 1 none; the columns share their axes."""
    run = write_run(tmp_path / "run", settings={"backend": {"replicas": 3}})
    for name, numbers in (("steps.csv", (0, 0, 2, 2, 2)), ("requests.csv", (0, 0, 2, 2))):
        pd.read_csv(run / name).assign(replica=numbers).to_csv(run / name, index=False)
    panels = composition.draw(run).axes
    assert [panel.get_title(loc="left") for panel in panels[:3]] == ["replica 0", "replica 1, idle", "replica 2"]
    assert [lines(panel).get("running") for panel in panels[3:6]] == [
        *(([1.25, 3.5], [1, 2]), None, ([6.0, 8.5, 11.5], [0, 1, 0]))
    ]
    assert panels[0].get_ylim() == panels[2].get_ylim() and panels[0].get_ylim()[1] >= 8
    assert [panel.get_title(loc="left") for panel in composition.draw(run, replicas=(2,)).axes[:1]] == ["replica 2"]
    with pytest.raises(ConfigError, match="replicas=3: no such replica; the run has 3, counted from 0"):
        composition.draw(run, replicas=(3,))


def test_nothing_is_drawn_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is idle from 2 to 9 s, longer than any iteration takes."""
    steps = pd.DataFrame(
        {"started": [0.0, 1.0, 9.0, 10.0], "ended": [1.0, 2.0, 10.0, 11.0], "num_running": [3, 4, 5, 6]}
    )
    for most, expected in ((400, [(0, 3), (1, 4), (2, 0), (9, 5), (10, 6)]), (3, [(0, 3.5), (2, 0), (9, 5.5)])):
        monkeypatch.setattr(composition, "_MOST_STEPS", most)
        drawn, _ = composition._thin_out(steps)
        assert list(zip(drawn["started"], drawn["num_running"], strict=True)) == expected


def test_no_iteration_is_left_over_behind_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven iterations, a pause and nine, the first with a prompt: a mean of few would be too narrow to see, and set the axis."""
    monkeypatch.setattr(composition, "_MOST_STEPS", 12)
    started = np.array([*range(7), *range(20, 29)], float)
    tokens = np.where(started == 20, 256, 1)
    drawn, how = composition._thin_out(pd.DataFrame({"started": started, "ended": started + 1, "tokens": tokens}))
    assert list(zip(drawn["started"], drawn["tokens"], strict=True)) == [
        (0, 1),
        (4, 1),
        (7, 0),
        (20, 86),
        (23, 1),
        (26, 1),
    ]
    assert how == "each bar: up to 4 iterations"


def test_what_prompts_consist_of_with_a_prefix_cache() -> None:
    """Ten requests are admitted in each of two seconds."""
    columns = {"cached_tokens": [20] * 10 + [0] * 10, "recomputed_tokens": [0] * 19 + [100]}
    requests = pd.DataFrame({"admitted": [0.5] * 10 + [1.5] * 10, "prompt_tokens": [40] * 20, **columns})
    panel = new_figure(1, 1, 1.0)[1][0][0]
    composition._draw_prompts(panel, requests, 2.0)
    tops = [
        [y for x, y in area.get_paths()[0].vertices if x == place] for area in panel.collections for place in (0.0, 2.0)
    ]
    assert [area.get_label() for area in panel.collections] == ["found", "computed", "recomputed"]
    assert [max(values) for values in tops] == pytest.approx([50, 0, 100, 80, 100, 100])


def test_service_of_clients_over_time(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ann's request of 7 + 2 * 2 is served from 11 to 12 s; the others', of 5 + 2 * 3 from 3 to 8 s and 3 + 2 at 8 s.

    In the second run, shorter than a window of 60 s, Ann's weight is 2; in the third, all requests arrive at 0.25 s.
    """
    total, rate, unfair = service.draw(folder, window=2.0).axes
    ann, others = {10.9: 0, 11.5: 5.5, 12.0: 11}, {2.9: 0, 5.5: 5.5, 7.9: 10.78, 8.1: 16}
    for name, expected in (("ann", ann), ("no client", others)):
        x, y = lines(total)[name]
        assert np.interp(list(expected), x, y) == pytest.approx([each / 1e3 for each in expected.values()], abs=2e-4)
    x, y = lines(rate)["no client"]
    assert np.interp([1.0, 3.0, 5.5], x, y) == pytest.approx([0, 1.1, 2.2], abs=0.03)
    [(middle, difference)] = lines(
        unfair
    ).values()  # the last windows receive 2.2 per second, of which ann wants nothing yet
    assert middle == pytest.approx([1 + 0.225 * tick for tick in range(1, 20)]) and difference[-1] == pytest.approx(0)
    settings = {"workload": {"length": 8}, "metrics": {"client_weights": {"ann": 2.0}}}
    total, rate, _ = service.draw(run := write_run(tmp_path / "run", settings=settings)).axes
    assert lines(total)["ann"][1][-1] == pytest.approx(11 / 2 / 1e3)
    assert np.interp([2.0, 10.0, 11.6], *lines(rate)["ann"]) == pytest.approx([0, 0, 5.5], abs=0.6), (
        "in windows of 1.2 s"
    )
    requests = pd.read_csv(run / "requests.csv")
    requests.assign(arrival=0.25).to_csv(run / "requests.csv", index=False)
    assert len(service.draw(run).axes) == 2, "no panel without a service difference"
    assert not capsys.readouterr().err


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Path]:
    """Returns a folder for each plot."""
    root = tmp_path_factory.mktemp("command")
    rates = write_rates(root / "rates", "rate", (1, 2))
    ratios = write_ratios(root / "ratios", {"orca": {2: (1.0,), 14: (2.0,)}, "sarathi": {2: (1.5,), 14: (3.0,)}})
    others = dict.fromkeys(("throughput_vs_pd", "curves", "heatmap"), ratios) | {
        "schedule": with_decisions(root / "small"),
        "replicas": root / "replicas",
        "tradeoff": ratios,
    }
    keys = {"replicas": 2, "requests": 20, "output": root / "replicas", "timeline": False}
    simulate("orca", "open_loop", autoscale="fixed(replicas=1)", **keys)
    return {name: rates if "rate" in name or name == "attainment" else folder for name in NAMES} | others


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_command_writes_files(name: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    curve, cells = (
        [f"y={SPEED}", "x=workload.pd_ratio"],
        ["x=workload.pd_ratio", "y=policy", f"value={SPEED}", "format=png"],
    )
    both = [f"x={SPEED}", "y=run.seconds", "format=png"]
    options = {"table": [], "curves": curve, "heatmap": cells, "tradeoff": both}.get(name, ["format=png"])
    formats = {"table": ["md"], "curves": ["pdf", "png"]}.get(name, ["png"])
    assert main([name, str(folders[name]), *options]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines() if line.startswith(str(folders[name]))]
    stem = ",".join([name, *(option for option in options if "format" not in option)])
    assert written == [folders[name] / "plots" / f"{stem}.{suffix}" for suffix in formats], (
        "another figure, another file"
    )
    assert all(path.stat().st_size > 500 for path in written)
    assert not any(b"/Type3" in path.read_bytes() for path in written), "fonts that publishers refuse"


@pytest.mark.long
def test_every_plot_takes_its_looks(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels that begin with _ are in the legend, and $ is no mathematics."""
    folder = folders["latency_vs_rate"]
    options = ["labels=prefill_first=_$1", "size=3.5,2", "title=$_$", "notes=false", f"output={tmp_path}/a.1.svg"]
    assert main(["latency_vs_rate", str(folder), *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}/a.1.svg"
    assert (
        main(["table", str(folder), f"output={tmp_path}"]) == 0
        and "offered" in (tmp_path / "rates,table.md").read_text()
    )
    look = Look({"prefill_first": "_$1"}, size=(3.5, 2.0), title="My $x$", notes=False)
    figure = curves.latency_vs_rate(folder, look)
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["_$1"] and legend.get_title().get_text() == "My $x$"
    assert not legend.get_title().get_parse_math()
    assert figure.get_size_inches().tolist() == [3.5, 2.0] and figure.get_supxlabel() == ""


@pytest.mark.long
def test_a_file_has_the_size_that_is_chosen_with_all_texts_inside(tmp_path: Path) -> None:
    """Six policies make a legend of three rows; 3.5 x 2.5 inches are 252 x 180 points."""
    write_ratios(
        tmp_path, {name: {2: (1.0,), 14: (2.0,)} for name in ("fcfs", "mlfq", "orca", "sarathi", "sjf", "vtc")}
    )
    assert main(["throughput_vs_pd", str(tmp_path), "size=3.5,2.5", "format=svg"]) == 0
    assert 'width="252pt" height="180pt"' in (tmp_path / "plots" / "throughput_vs_pd.svg").read_text()
    figure = curves.throughput_vs_pd(tmp_path, Look(size=(3.5, 2.5)))
    figure.draw_without_rendering()
    left, bottom, right, top = figure.get_tightbbox().extents
    assert min(left, bottom) >= 0 and right <= 3.5 and top <= 2.5


def test_an_axis_without_ticks_has_no_labels() -> None:
    _, [[panel]] = new_figure(1, 1, 2.0)
    panel.plot([1e-3, 1e3], [1, 2])
    panel.set_xscale("log")
    label_log(panel.xaxis)
    assert panel.xaxis.get_major_formatter().format_ticks([]) == []


OWN = """
from experiments.store.runs import read_runs
from matplotlib.figure import Figure
def draw(folder, look, column: str = "label"):
    return Figure(label=read_runs(folder)[column].iloc[0])
def fails(folder, look):
    return 1 / 0
def nothing(folder, look):
    pass
def few(folder):
    pass
def untyped(folder, look, size_of_it=3):
    pass
"""


def test_an_own_function_draws_a_plot(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_plots.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["own_plots.draw", str(folder), "column=model", f"output={tmp_path}/a.png"]) == 0
    assert (tmp_path / "a.png").is_file()
    for name, message in {
        "draw": "colum: no such key; did you mean column?",
        "fails": "plot own_plots.fails: fails() raised ZeroDivisionError: division by zero (own_plots.py:7)",
        "nothing": "plot own_plots.nothing: returned a NoneType; return a matplotlib figure",
        "few": "plot own_plots.few: takes no (folder, look); see docs/adding.md",
        "untyped": "size_of_it has no type; annotate it",
        "drew": "did you mean own_plots.draw?",
    }.items():
        assert main([f"own_plots.{name}", str(folder), *["colum=model"] * (name == "draw")]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Path]:
    """Returns folders of runs that some plots cannot draw."""
    root = tmp_path_factory.mktemp("bad")
    clientless = write_run(root / "clientless")
    (clientless / "requests.csv").write_text((clientless / "requests.csv").read_text().replace("ann", ""))
    (root / "empty").mkdir()
    unserved = write_run(root / "unserved", figures={"run": {"requests": 0, "iterations": 0}})
    for table in (unserved / "requests.csv", unserved / "steps.csv"):
        table.write_text(table.read_text().splitlines(keepends=True)[0])
    for speed in (1, 2):
        together = {"run": {"offered_requests_per_second": None}}
        write_run(root / "together" / str(speed), {}, {"workload": {"speed": speed}}, figures=together)
    (root / "together" / "errors.log").write_text("bad: no memory\n")  # a run that is not shown
    return {"one": folder, "clientless": clientless} | {name: root / name for name in ("empty", "unserved", "together")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["thruput", "."], "plot thruput: no such plot; did you mean throughput_vs_pd?"),
        (["{one}", "schedule"], "is a folder; give the plot first: python -m experiments.plot NAME"),
        (["schedule"], "plot schedule: needs a run's or sweep's folder"),
        (["table", "{empty}"], "holds no finished run"),
        (["schedule", "{one}", "frist=3"], "plot schedule: frist: no such key; did you mean first?"),
        (["latency_cdf", "{one}", "sise=3,2"], "plot latency_cdf: sise: no such key; did you mean size?"),
        (["schedule", "{one}"], "decisions.jsonl.gz: no such file; record a run's decisions with decisions=true"),
        (["composition", "{one}", "size=3"], "size=3: give width and height in inches"),
        (
            ["composition", "{one}", "size=3,1"],
            "size=3,1: leaves no room for the panels; give a larger one, or leave out",
        ),
        (["composition", "{one}", "labels=a"], "labels=a: give LABEL=TEXT"),
        (["composition", "{one}", "order=a"], "order: a: no such key; known: prefill_first"),
        (["composition", "{one}", "format=doc"], "format=doc: no such format; choose among "),
        (["throughput_vs_pd", "{one}"], "needs runs with several values of workload.pd_ratio; sweep it with -m "),
        (["latency_vs_rate", "{one}"], "sweep it with -m workload=open_loop workload.arrivals.rate=1,2,4,8"),
        (
            ["latency_vs_rate", "{together}", "percentiles=98"],
            "figure=ttft_seconds.p98: summary.json has no such number; did you mean ttft_seconds.p9",
        ),
        (["attainment", "{one}", "goal=90"], "goal=90: give a share above 0, at most 1"),
        (["curves", "{one}", "x=batch"], "plot curves needs y="),
        (["curves", "{one}", "x=label_", "y=run.iterations"], "x=label_: no run has this setting; did you mean label"),
        (["curves", "{together}", "x=rate", "y=run.iterations,run.preemption"], "did you mean run.preemptions"),
        (
            ["curves", "{one}", "x=policy", f"y={SPEED}"],
            "needs runs with several values of policy; sweep it with -m policy=",
        ),
        (["heatmap", "{together}", "x=batch", "y=seed", f"value={SPEED}"], "x=batch: no run has this setting"),
        (
            ["heatmap", "{together}", "x=batch", "y=seed", f"value={SPEED}", "xlim=1,2"],
            "plot heatmap: xlim: no such key",
        ),
        (["service", "{one}", "window=0"], "window=0: give a finite number above 0 (seconds)"),
        (["service", "{clientless}"], "no request names its client; choose a workload with clients"),
        (["latency_cdf", "{unserved}"], "no request was served, so there is no latency to draw; choose another run"),
        (["composition", "{unserved}"], "the run has no iterations to draw; choose another run"),
        (["latency_vs_rate", "{together}"], "x=rate: requests arrive together, without a rate"),
        (["table", "{one}", "runs=vllm"], "runs=vllm: no folder name contains this"),
    ],
)
def test_bad_requests_are_one_line(
    arguments: list[str], message: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(**places) for argument in arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
