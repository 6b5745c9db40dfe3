"""`experiments.plot`: what is on the axes is what is in the results; each plot is drawn and written."""

import math
import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hand_made import write_run
from matplotlib.axes import Axes

from cbatch import ConfigError
from experiments.compare import pairs_of
from experiments.plots import composition, curves, latency_cdf, series, tradeoff
from experiments.plots.style import Look
from experiments.store.replications import read_replications

T1 = 12.7062
"""Standard errors that the interval of a mean of two values reaches to each side."""
SPEED = "throughput.total_tokens_per_second"
Points = tuple[list[float], list[float]]


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


def test_a_baseline_may_have_the_arguments_that_its_lines_share(tmp_path: Path) -> None:
    """The lines leave out chunk=9, which tables print."""
    speeds = {"a(chunk=9)": {2: (1.0,), 14: (2.0,)}, "a(chunk=9, k=1)": {2: (3.0,), 14: (4.0,)}}
    _, gains = curves.throughput_vs_pd(write_ratios(tmp_path, speeds), baseline="a(chunk=9)").axes
    assert lines(gains)["a(k=1)"] == ([2, 14], [3, 2]) and gains.get_ylabel() == "throughput over a"


def test_a_baseline_may_be_named_as_on_the_command_line_and_keeps_all_colours(tmp_path: Path) -> None:
    """Wide latencies have logarithmic ratios, with 1 as a tick."""
    for (policy, given), rate in product({"a": "a", "b": "'b(drafting=none)'"}.items(), (1, 4)):
        settings = {"workload": {"arrivals": {"rate": rate}}}
        figures = {"ttft_seconds": {"p50": 1.0 * rate ** (4 if policy == "a" else 1)}}
        write_run(
            tmp_path / f"{policy},{rate}",
            {"policy": policy, "overrides": [f"policy={given}"]},
            settings,
            figures=figures,
        )
    options: dict[str, Any] = {"x": "workload.arrivals.rate", "y": ("ttft_seconds.p50",)}
    [plain] = curves.draw(tmp_path, **options).axes
    left, ratios = curves.draw(tmp_path, **options, baseline="b(drafting=none)").axes
    colours = [{str(line.get_label()): line.get_color() for line in panel.get_lines()} for panel in (plain, left)]
    assert colours[0] == colours[1] and list(colours[1]) == ["b(drafting=none)", "a"]
    assert ratios.get_ylabel() == "TTFT P50 over\nb(drafting=none) (log)" and 1 in ratios.get_yticks()
    assert lines(ratios)["a"] == ([1, 4], [1, 64]) and (left.get_yscale(), ratios.get_yscale()) == ("log", "log")


def test_a_logarithmic_axis_refuses_values_of_0(tmp_path: Path) -> None:
    for age in (0.0, 0.5):
        write_run(tmp_path / f"{age}", settings={"backend": {"staleness": age}})
    [panel] = curves.draw(tmp_path, x="backend.staleness", y=(SPEED,)).axes
    assert panel.get_xlabel() == "age of the router's reports [s]"
    with pytest.raises(ConfigError, match=r"^xscale=log: backend\.staleness is 0 in some runs"):
        curves.draw(tmp_path, Look(xscale="log"), x="backend.staleness", y=(SPEED,))


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
        assert f"orca: independent of {key}, drawn as a level line" in figure.get_supxlabel()


def test_a_run_without_the_setting_is_a_level_line_beside_those_with_it(tmp_path: Path) -> None:
    """A layout without roles beside two ratios of prefillers to decoders, under one policy. A setting that is null is left out as before."""
    pools = [{}, *({"pools": {"p": {"replicas": count}, "d": {"replicas": 4 - count}}} for count in (1, 3))]
    for place, (each, batch) in enumerate(zip(pools, (None, 4, 8), strict=True)):
        write_run(tmp_path / str(place), settings={"batch": batch, "backend": each}, speed=10.0 + place)
    name = "prefill_first, without backend.pools.p.replicas"
    for key in ("backend.pools.p.replicas", "p.replicas"):
        figure = curves.draw(tmp_path, x=key, y=(SPEED,))
        drawn = lines(figure.axes[0])
        assert drawn.pop(name.replace("backend.pools.p.replicas", key)) == ([1, 3], [10, 10])
        assert [*drawn.values()] == [([1, 3], [11, 12])]
    [of_batch] = curves.draw(tmp_path, x="batch", y=(SPEED,)).axes
    assert not any("without" in label for label in lines(of_batch)), "the first run's batch is the default"


def test_a_run_whose_replicas_have_both_roles_is_named_so_beside_pools_with_roles(tmp_path: Path) -> None:
    """As in tables, where the same run is `pools=4 both`."""
    pools = [
        {"p": {"replicas": count, "role": "prefill"}, "d": {"replicas": 4 - count, "role": "decode"}}
        for count in (1, 3)
    ]
    for place, each in enumerate([{"all": {"replicas": 4, "role": None}}, *pools]):
        write_run(tmp_path / str(place), settings={"backend": {"replicas": 4, "pools": each}}, speed=10.0 + place)
    drawn = lines(curves.draw(tmp_path, x="p.replicas", y=(SPEED,)).axes[0])
    assert drawn == {"prefill_first": ([1, 3], [11, 12]), "prefill_first, 4 both": ([1, 3], [10, 10])}


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
    assert title.startswith("prefill_first: llama-13b, closed batch, batches of at most 4, 0.571 requests/s, ")
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


def test_a_narrow_percentile_beside_a_wide_one_is_logarithmic_too(tmp_path: Path) -> None:
    for rate, p50 in ((1, 0.003), (4, 0.03)):
        figures = {"tbt_seconds": {"p50": p50, "p99": 0.04}, "run": {"offered_requests_per_second": rate}}
        write_run(tmp_path / str(rate), settings={"workload": {"arrivals": {"rate": rate}}}, figures=figures)
    _, wide, _, narrow = curves.latency_vs_rate(tmp_path).axes
    low, high = narrow.get_ylim()
    assert wide.get_yscale() == narrow.get_yscale() == "log" and low < 40 < high and high >= 3 * low


def test_limits_and_scales_of_axes_are_the_users(tmp_path: Path) -> None:
    """Logarithmic by the user's will over any range; a label that was logarithmic loses the word."""
    folder = write_rates(tmp_path, "rate", (1, 4))
    [ttft, _] = curves.latency_vs_rate(folder, Look(xlim=(1, 99), xscale="log", yscale="linear"), (50,)).axes
    assert ttft.get_yscale() == "linear" and ttft.get_ylabel() == "TTFT P50 [s]"
    assert ttft.get_xscale() == "log" and ttft.get_xlim()[1] == 99 and ttft.get_xlabel().endswith("(log)")
    [panel, _] = curves.latency_vs_rate(folder, Look(ylim=(0.5, 7)), (50,)).axes
    assert panel.get_ylim() == (0.5, 7)


@pytest.mark.long
def test_an_axis_that_began_at_0_is_logarithmic_around_its_data(tmp_path: Path) -> None:
    """The swept batches are its ticks; a logarithmic axis has no 0, and names have no logarithm."""
    for batch in (4, 32, 128):
        write_run(tmp_path / str(batch), settings={"batch": batch, "eviction": f"e{batch}"}, speed=100.0 * batch)
    draw, y = curves.draw, (SPEED, "run.iterations")
    for look in (Look(), Look(xscale="log", yscale="log")):
        speed, iterations = draw(tmp_path, look, x="batch", y=y).axes
        assert (speed.get_xscale(), list(speed.get_xticks())) == ("log", [4, 32, 128]), "4 to 32 and 32 to 128 alike"
        assert 3 < speed.get_xlim()[0] < 4 and 128 < speed.get_xlim()[1] < 170
        assert speed.get_xlabel() == "largest batch [requests] (log)" and iterations.get_ylabel()[:10] == "iterations"
    assert speed.get_yscale() == "log" and 200 < speed.get_ylim()[0] < 400 and 12800 < speed.get_ylim()[1] < 20000
    panel = draw(tmp_path, Look(xscale="linear"), x="batch", y=y).axes[0]
    assert (panel.get_xscale(), panel.get_xlim()[0], panel.get_xlabel()) == ("linear", 0, "largest batch [requests]")
    assert draw(tmp_path, Look(runs="4|32"), x="batch", y=y).axes[0].get_xscale() == "linear"
    point = tradeoff.draw(tmp_path, Look(xscale="log"), x=SPEED, y="run.iterations").axes[0]
    assert 200 < point.get_xlim()[0] < 400
    with pytest.raises(ConfigError, match=r"xlim=0,200: a logarithmic axis has no 0; give ends above it"):
        draw(tmp_path, Look(xlim=(0, 200)), x="batch", y=y)
    with pytest.raises(ConfigError, match=r"xscale=log: the values of eviction are names; leave it out"):
        draw(tmp_path, Look(xscale="log"), x="eviction", y=y)


def test_beyond_three_lines_intervals_are_error_bars(tmp_path: Path) -> None:
    """Two seeds, 1 and 3, of each policy; the fourth policy turns bands, which would merge, into bars."""
    policies = [f"p{number}" for number in range(4)]
    speeds = {policy: {2: (1.0, 3.0), 14: (4.0, 4.0 + number)} for number, policy in enumerate(policies)}
    [panel] = curves.throughput_vs_pd(write_ratios(tmp_path, speeds)).axes
    assert {*policies} <= {*lines(panel)}
    bars = [bar.tolist() for of_line in panel.collections for bar in of_line.get_segments()]
    assert bars[0] == bars[6] == [[2, pytest.approx(2 - T1)], [2, pytest.approx(2 + T1)]] and len(bars) == 8
    widths = [line.get_markersize() for line in panel.get_lines() if line.get_marker() == "_"]
    assert len({*widths}) == 4 and widths == sorted(widths, reverse=True), (
        "caps of earlier lines show behind later ones"
    )
    few = curves.throughput_vs_pd(tmp_path, Look(runs="p1|p2|p3")).axes[0].collections
    assert [len(area.get_paths()) for area in few] == [1] * 3 and not hasattr(few[0], "get_segments")


@pytest.mark.parametrize("size", [None, (3.4, 3.4)])
@pytest.mark.parametrize("number", [3, 5])
def test_all_markers_are_at_their_values_and_whole(
    number: int, size: tuple[float, float] | None, tmp_path: Path
) -> None:
    """On a page and in a column, with bands and with error bars, also where a value of x is 0 and figures are 0 or a whole share."""
    values = {0: (0, 1.0), 200: (3, 0.5), 1000: (5, 0.0)}
    for policy, x, seed in product(range(number), values, (0, 1)):
        preemptions, share = values[x]
        figures = {"run": {"preemptions": preemptions * (policy + seed)}, "attainment": {"share": share}}
        settings = {"seed": seed, "age": x, "workload": {"seed": seed}}
        write_run(tmp_path / f"{policy} {x} {seed}", {"policy": f"p{policy}"}, settings, figures=figures)
    figure = curves.draw(tmp_path, Look(size=size), x="age", y=("run.preemptions", "attainment.share", SPEED))
    figure.draw_without_rendering()
    shown = {f"p{policy}": ([0, 200, 1000], [0, 3 * policy + 1.5, 5 * policy + 2.5]) for policy in range(number)}
    assert lines(figure.axes[0]).items() >= shown.items()
    for panel in figure.axes:
        for line in (line for line in panel.get_lines() if not str(line.get_label()).startswith("_")):  # no caps
            drawn = line.get_transform().transform(line.get_xydata())
            assert drawn == pytest.approx(panel.transData.transform(line.get_xydata())), "no line is moved sideways"
            room = panel.bbox.padded(-line.get_markersize() if line.get_clip_on() else 0.01)
            assert all(room.contains(*place) for place in drawn)


def test_markers_outside_the_limits_of_the_user_are_not_drawn(tmp_path: Path) -> None:
    for age in (1, 2, 9):
        write_run(tmp_path / str(age), settings={"age": age}, speed=10.0 * age)
    for look, clips in ((Look(), False), (Look(xlim=(1, 5)), True), (Look(ylim=(0, 50)), True)):
        [line] = curves.draw(tmp_path, look, x="age", y=(SPEED,)).axes[0].get_lines()
        assert line.get_clip_on() == clips, look


def test_a_line_for_each_other_argument_of_the_policy(tmp_path: Path) -> None:
    """Two arguments are swept, both with a value that is the default and missing in the policy's text; x is in no label."""
    for target, ttft, other in product((0.005, 0.1), (1, 10), (False, True)):
        given = [f"target={target}"] * (target != 0.1) + [f"ttft={ttft}"] * (ttft != 10)
        policy = "orca" if other else f"lars({', '.join(given)})" if given else "lars"
        settings = {"policy": {} if other else {"_target_": "lars.LARS", "target": target, "ttft": ttft}}
        about = {"policy": policy, "overrides": ["policy=lars", f"policy.target={target}", f"policy.ttft={ttft}"]}
        speed = 7.0 if other else ttft + target
        write_run(tmp_path / str(other) / f"{policy},{target},{ttft}", {**about}, settings, speed=speed)
    figure = curves.draw(tmp_path / "False", x="policy.target", y=(SPEED,))
    drawn = {"ttft=1": ([0.005, 0.1], [1.005, 1.1]), "ttft=10": ([0.005, 0.1], [10.005, 10.1])}
    assert lines(figure.axes[0]) == drawn
    assert figure.legends[0].get_title().get_text().startswith("lars: ")
    assert list(figure.axes[0].get_xticks()) == [0.005, 0.1]
    both = lines(curves.draw(tmp_path, x="policy.target", y=(SPEED,)).axes[0])
    assert both == {f"lars, {label}": points for label, points in drawn.items()} | {"orca": ([0.005, 0.1], [7, 7])}


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
    assert (lines(setting)["prefill_first"][0], setting.get_xlabel()) == ([1, 4], "rate of arrivals, as set [1/s]")
    figure = latency_cdf.draw(tmp_path, Look(runs="open_loop,4"))
    assert "open_loop(4), batches of at most 4, 32 requests/s" in figure.legends[0].get_title().get_text()
    assert "requests/s" not in latency_cdf.draw(tmp_path, Look(runs="open")).legends[0].get_title().get_text()


def test_attainment_of_all_requests_and_of_each_tier(tmp_path: Path) -> None:
    """The tier `rest` attains all in each run, which is stated below. Requests have objectives, so those of `metrics` are none of theirs."""
    slos = {"slo": {"ttft": 0.5, "tbt": 0.05, "total": None}, "tiers": {"rest": {"share": 0.5, "slo": {"total": 60}}}}
    default = {"metrics": {"objectives": {"ttft": 3, "tpot": None}}}
    for rate, seed in product((1, 4), (0, 1)):
        tiers = {"gold": {"share": 1 / rate}, "rest": {"share": 1.0}}
        figures: dict[str, Any] = {"run": {"offered_requests_per_second": rate}}
        figures |= {"attainment": {"share": (0.9 + 0.1 * seed) / rate, "ttft_share": 0.5, "tiers": tiers}}
        write_run(
            tmp_path / f"{rate} {seed}",
            settings={"seed": seed, "workload": {"arrivals": {"rate": rate}, **slos}, **default},
            figures=figures,
        )
    figure = curves.attainment(tmp_path, goal=0.8)
    title = re.sub(r"\s+", " ", figure.legends[0].get_title().get_text())
    assert "(TTFT 0.5 s, every gap 0.05 s; rest end to end 60 s; mean and 95% interval of 2 runs per point)" in title
    whole, gold = figure.axes
    assert lines(whole)["prefill_first"] == ([1, 4], pytest.approx([95, 95 / 4]))
    assert lines(gold)["prefill_first"] == ([1, 4], [100, 25])
    assert lines(gold)["goal: 80%"][1] == [80, 80]
    assert band(whole, 1) == pytest.approx((95 - 5 * T1, 100), rel=1e-4) and whole.get_ylim() == (0, 100)
    assert "rest attained [%]: 100 in each run" in figure.get_supxlabel()
    assert "12.7 standard errors" in figure.get_label()
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


def test_objectives_of_a_run_stand_where_requests_have_none() -> None:
    of_runs = pd.DataFrame(
        {"metrics.objectives.ttft": [0.5, 0.5], "metrics.objectives.tpot": [0.02, 0.02], "workload.slo.tbt": [0.1, 0.2]}
    )
    assert series.describe_objectives(of_runs) == "TTFT 0.5 s, TPOT 0.02 s", "those of requests differ between runs"
    assert series.describe_objectives(of_runs.assign(**{"workload.slo.tbt": 0.1})) == "every gap 0.1 s"
