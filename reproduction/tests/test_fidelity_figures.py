"""The figures of simulation held against real runs: errors, their signs, ranges and summaries, of runs made by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hand_made import make_record
from places import ROOT
from schedules import UnitCost
from test_figures import FIGURES

from cbatch import SLO, BatchShape, ConfigError, Request
from cbatch.sim import PROFILES
from cbatch.sim.cost import StageTimes
from cbatch.sim.measured import HostTime
from reproduction.validation import compare, report, stored
from reproduction.validation.compare import TARGETS, Pair
from reproduction.validation.fidelity import statement
from reproduction.validation.runs import ServedRun, figures, percentile_ranks, run_of

NAMES = tuple(TARGETS)
RECORD = make_record()
SETTINGS = {"case": "trace", "policy": "orca", "model": "llama-3.1-8b", "batch": 4}
SHAPES = [
    BatchShape(((5, 0),), num_padding=3),
    BatchShape(((4, 0),), 1, 6),
    BatchShape(((3, 0),), 1, 7),
    BatchShape(((7, 0),), num_padding=1),
    BatchShape((), 1, 8),
]
ASKED = [Request(0, 5, 3, arrival_time=0.25), Request(1, 7, 2, arrival_time=1.5), Request(3, 3, 1, arrival_iteration=2)]


# -- a run ------------------------------------------------------------------------------------------------------------


def test_figures_of_a_run() -> None:
    """From the first plan, at 1 s, to the last token, at 12 s; 15 tokens of prompts and 6 of output.

    The one request with objectives, number 1, has its first token after 9.5 s, and had asked for it within 4.
    """
    expected = {"total time": 11, "throughput": 21 / 11, "attainment": 0.0}
    expected |= {"TTFT P50": 2.75, "TTFT P99": 2.75 + 0.98 * 6.75, "TBT P50": 2, "TBT P99": 2.98}
    kinds = {"TTFT": "ttft", "TBT": "tbt", "TPOT": "tpot", "end to end": "end_to_end", "longest gap": "longest_gap"}
    for shown, kind in kinds.items():
        by_hand = FIGURES[f"{kind}_seconds"]
        expected |= {f"{shown} {rank}": by_hand[rank.lower()] for rank in ("mean", "P50", "P90", "P99")}
    assert figures(RECORD) == pytest.approx(expected)


def test_percentiles_of_another_run_have_a_rank_in_this_one() -> None:
    """Time to first token 2.5, 2.75 and 9.5 s, between tokens 1, 2 and 3 s."""
    other = {"total time": 5, "TTFT P50": 2.75, "TTFT P99": 6.125, "TBT P50": 1.5, "TBT P99": 9}
    assert percentile_ranks(RECORD, other) == {"TTFT P50": 50, "TTFT P99": 75, "TBT P50": 25, "TBT P99": 100}


@pytest.fixture(scope="module")
def served() -> ServedRun:
    return run_of(SETTINGS, RECORD, ASKED, SHAPES)


def test_requests_are_kept_with_their_tiers_and_objectives() -> None:
    slo = SLO(ttft=4.0, total=9.0)
    asked = [Request(0, 5, 3, tier="gold", slo=slo), Request(1, 7, 2), Request(3, 3, 1, tier="gold", slo=slo)]
    kept = run_of(SETTINGS, RECORD, asked, SHAPES).requests()
    assert [(request.tier, request.slo) for request in kept] == [("gold", slo), (None, SLO()), ("gold", slo)]


def test_a_run_is_kept_in_microseconds_from_its_first_plan(served: ServedRun) -> None:
    expected = {
        "request.prompt": [5, 7, 3],
        "request.output": [3, 2, 1],
        "request.true_output": [0, 0, 0],
        "request.tier": [-1, -1, -1],
        "request.arrival": [250_000, 1_500_000, 0],
        "request.arrival_iteration": [0, 0, 2],
        "request.first_token": [2_000_000, 10_000_000, 7_000_000],
        "request.last_token": [7_000_000, 11_000_000, 7_000_000],
        "step.planned_at": [0, 2_250_000, 4_500_000, 7_250_000, 10_250_000],
        "step.launched_at": [250_000, 2_500_000, 5_000_000, 7_500_000, 10_500_000],
        "step.received_at": [2_000_000, 4_000_000, 7_000_000, 10_000_000, 11_000_000],
        "step.done_at": [2_250_000, 4_500_000, 7_250_000, 10_250_000, 11_750_000],
        "step.started": [250_000, 2_500_000, 5_000_000, 7_500_000, 10_500_000],
        "step.ended": [2_000_000, 4_000_000, 7_000_000, 10_000_000, 11_000_000],
        "step.num_chunks": [1, 1, 1, 1, 0],
        "step.num_decodes": [0, 1, 1, 0, 1],
        "step.decode_context": [0, 6, 7, 0, 8],
        "step.padding": [3, 0, 0, 1, 0],
        "chunk.tokens": [5, 4, 3, 7],
        "chunk.context": [0, 0, 0, 0],
    }
    assert {name: column.tolist() for name, column in served.columns.items()} == expected
    assert (served.name, served.shapes()) == (("trace", "orca"), SHAPES)
    again = [(each.num_prompt_tokens, each.max_new_tokens, each.arrival_time, each.arrival_iteration) for each in ASKED]
    assert [
        (each.num_prompt_tokens, each.max_new_tokens, each.arrival_time, each.arrival_iteration)
        for each in served.requests()
    ] == again


def test_the_device_works_and_pauses_in_turn(served: ServedRun) -> None:
    assert served.device_seconds().tolist() == [1.75, 1.5, 2.0, 2.5, 0.5]
    assert served.pauses().tolist() == [0, 0.5, 1.0, 0.5, 0.5]


def test_an_iteration_launched_early_begins_when_the_one_before_it_ends() -> None:
    columns = {"step.started": np.array([10, 15, 35]), "step.ended": np.array([20, 30, 40])}
    early = ServedRun({}, {}, columns)
    assert (early.device_seconds() * 1e6).tolist() == pytest.approx([10, 10, 5])
    assert (early.pauses() * 1e6).tolist() == pytest.approx([0, 0, 5])


# -- iterations one by one --------------------------------------------------------------------------------------------


class Cost:
    """A tenth more than measured with prompts, except for 7 tokens; a fifth less for decodes alone."""

    power = None

    def __init__(self, *_: object) -> None:
        pass

    def execute(self, shape: BatchShape) -> StageTimes:
        seconds = {5: 1.1 * 1.75, 4: 1.1 * 1.5, 3: 1.1 * 2.0, 7: 2.5, 0: 0.8 * 0.5}
        times = dict.fromkeys(StageTimes._fields, 0.0)
        parts = {"compute": 0.5, "embedding": 0.2, "head": 0.3}
        whole = seconds[shape.chunks[0][0] if shape.chunks else 0]
        return StageTimes(**{**times, "pace": whole, **{name: part * whole for name, part in parts.items()}})


def test_iterations_with_and_without_prompts_are_predicted_one_by_one(
    served: ServedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "Nudged", Cost)
    found = compare.iteration_errors(served, SimpleNamespace())  # type: ignore[arg-type]
    total = (1.1 * (1.75 + 1.5 + 2.0) + 2.5) / (1.75 + 1.5 + 2.0 + 2.5) - 1
    assert found == {
        "with prompts": {"number": 4, "seconds": 7.75, "total": pytest.approx(total), "median": pytest.approx(0.1)},
        "decodes alone": {"number": 1, "seconds": 0.5, "total": pytest.approx(-0.2), "median": pytest.approx(0.2)},
    }


def test_a_clock_that_gets_faster_saves_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause the GPU has power to spare: it saves a hundredth of a second for each second of rest."""

    class Clock:
        def __init__(self, power: object) -> None:
            self.rested = 0.0

        def rest(self, seconds: float) -> None:
            self.rested = seconds

        def run(self, pace: object) -> float:
            assert pace in (2.5, 0.4)
            return 0.01 * self.rested

    monkeypatch.setattr(compare, "GpuClock", Clock)
    cost: Any = Cost()
    cost.power = "some"
    assert compare.device_seconds(cost, SHAPES[3:], [0.0, 2.0]).tolist() == pytest.approx([2.5, 0.4 - 0.02])
    cost.power = None
    assert compare.device_seconds(cost, SHAPES[3:], [0.0, 2.0]).tolist() == pytest.approx([2.5, 0.4])


def test_a_simulation_takes_the_host_time_of_the_model(served: ServedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    class Profile:
        def host_time(self, *what: object) -> HostTime:
            asked.append(what)
            return HostTime(0.001)

    class Second(Cost):
        predict = UnitCost.predict

        def execute(self, shape: BatchShape) -> StageTimes:
            return StageTimes(**{**dict.fromkeys(StageTimes._fields, 0.0), "compute": 1.0})

    monkeypatch.setattr(compare, "Nudged", Second)
    sizes = {"max_tokens": 16, "longest": 10, "tile": 4, "num_blocks": 20, "block_size": 4}
    profile: Any = Profile()
    compare.simulate(replace(served, settings={**SETTINGS, **sizes}), profile)
    assert asked == [(True, "llama-3.1-8b")]


# -- several runs -----------------------------------------------------------------------------------------------------


def pair(case: str, policy: str, errors: dict[str, float], nudges: tuple[float, ...] = (), **settings: Any) -> Pair:
    """A run that measured 100, 200, ... and whose simulation is off by these errors, and by these more if nudged."""
    measured = {name: 100.0 * (place + 1) for place, name in enumerate(NAMES)}
    simulated = {name: measured[name] * (1 + errors.get(name, 0.0)) for name in NAMES}
    nudged = [{name: measured[name] * nudge + value for name, value in simulated.items()} for nudge in nudges]
    columns = {"request.prompt": np.zeros(40)}
    run = ServedRun({"case": case, "policy": policy, "model": "a", "batch": 48, **settings}, measured, columns)
    return Pair(run, simulated, {"TTFT P50": 47.0, "TTFT P99": 99.2}, nudged)


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    part = {"number": 3, "seconds": 1.5, "total": -0.014, "median": 0.021}
    monkeypatch.setattr(compare, "iteration_errors", lambda run, profile: {"with prompts": part})
    errors = {"total time": 0.01, "throughput": -0.02, "TTFT P50": 0.02, "TTFT P99": -0.04, "TBT P99": -0.06}
    pairs = [
        pair("trace", "orca", errors, (-0.02, 0.03)),
        pair("trace", "sarathi", {"total time": -0.05, "throughput": 0.01, "TTFT P50": 0.2}, (0.01,), model="b"),
        pair("pd", "orca", {"total time": 0.02, "TBT P99": 0.09, "TTFT P99": 0.12}, (0.0,)),
    ]
    profile: Any = SimpleNamespace(name="h200")
    return compare.compare(pairs, profile)


def test_errors_have_signs_and_ranges(result: dict[str, Any]) -> None:
    orca = result["cases"]["trace"]["orca"]
    signs = {"total time": 0.01, "throughput": -0.02, "TTFT P50": 0.02, "TTFT P99": -0.04, "TBT P99": -0.06}
    assert orca["error"] == pytest.approx(dict.fromkeys(NAMES, 0.0) | signs)
    assert orca["error_range"]["total time"] == pytest.approx([-0.01, 0.04])
    assert orca["error_range"]["TTFT P99"] == pytest.approx([-0.06, -0.01])
    assert result["cases"]["trace"]["sarathi"]["error_range"]["total time"] == pytest.approx([-0.05, -0.04])
    assert (orca["requests"], orca["model"], orca["load"]) == (40, "a", None)
    assert orca["percentile_rank"] == {"TTFT P50": 47.0, "TTFT P99": 99.2}
    place = NAMES.index("TBT P99") + 1
    assert orca["measured"]["TBT P99"] == 100 * place
    assert orca["simulated"]["TBT P99"] == pytest.approx(94 * place)


@pytest.mark.parametrize(
    ("name", "place", "within"),
    [("TBT P90", 90.3, True), ("TBT P90", 90.4, False), ("TBT P99", 98.7, True), ("TBT P50", 50.1, False)],
)
def test_only_high_percentiles_may_be_right_by_their_place(name: str, place: float, within: bool) -> None:
    """In a tail neighbouring values may lie far apart; a median has many beside it."""
    assert compare.is_within(name, 0.03, {"error": {name: 0.2}, "percentile_rank": {name: place}}) is within
    assert compare.is_within(name, 0.2, {"error": {name: 0.2}, "percentile_rank": {name: 0.0}})


def test_the_error_of_a_share_is_a_difference() -> None:
    assert compare._error("attainment", 0.5, 0.75) == -0.25
    assert compare._error("total time", 0.5, 0.75) == pytest.approx(-1 / 3)


def test_the_largest_and_the_median_error_are_of_sizes(result: dict[str, Any]) -> None:
    sizes = {"total time": (0.05, 0.02), "throughput": (0.02, 0.01), "TTFT P50": (0.2, 0.02)}
    sizes |= {"TTFT P99": (0.12, 0.04), "TBT P99": (0.09, 0.06)}
    nothing = dict.fromkeys(NAMES, 0.0)
    assert result["largest_error"] == pytest.approx(nothing | {name: most for name, (most, _) in sizes.items()})
    assert result["median_error"] == pytest.approx(nothing | {name: middle for name, (_, middle) in sizes.items()})
    assert (result["profile"], result["targets"]) == ("h200", TARGETS)


def test_the_total_time_of_an_open_loop_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arrivals take as long in both: only the queued run is judged by it."""
    monkeypatch.setattr(compare, "iteration_errors", lambda run, profile: {})
    profile: Any = SimpleNamespace(name="h200")
    wrong = {"total time": 0.04, "throughput": 0.04, "TPOT mean": 0.04}
    open_loop = pair("poisson", "orca", wrong, load=0.9)
    found = compare.compare([open_loop, pair("queued", "orca", {"TPOT mean": 0.02})], profile)
    largest = found["largest_error"]
    assert (largest["total time"], largest["throughput"], largest["TPOT mean"]) == pytest.approx((0, 0, 0.04))
    assert "total time" not in compare.compare([open_loop], profile)["median_error"]


def test_policies_rank_by_throughput(result: dict[str, Any]) -> None:
    """Both measured 200; simulated 196 and 202."""
    both = {"measured": ["orca", "sarathi"], "simulated": ["sarathi", "orca"], "swapped": {"orca; sarathi": 0.0}}
    assert result["ranking"] == {"trace": both, "pd": {"measured": ["orca"], "simulated": ["orca"], "swapped": {}}}


def test_iterations_of_several_cards_are_added_up_card_by_card() -> None:
    """Card 1: 1 s + 10% and 3 s - 2% are 4.04 s predicted, 1% more than measured."""

    def run(seconds: float, total: float) -> dict[str, Any]:
        return {"orca": {"iterations": {"decodes alone": {"seconds": seconds, "total": total}}}}

    cases = {"pd, card 1": run(1, 0.1), "queued, card 1": run(3, -0.02), "pd, card 2": run(2, -0.5)}
    assert compare.cards(cases) == {"1": {"decodes alone": pytest.approx(0.01)}, "2": {"decodes alone": -0.5}}
    assert (compare.card_of(compare.on_card("pd", 2)), compare.card_of("pd")) == (("pd", "2"), ("pd", "1"))
    assert compare.cards({"pd": run(1, 0.1)}) == {"1": {"decodes alone": pytest.approx(0.1)}}


WITHIN = "within target (3% of means and medians, 8% of P90 and P99, or 0.3 percentiles): 51 of 54 figures, all of them in 1 of 3 runs"


def test_the_printed_table_shows_each_figure_under_its_name(
    result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    report.show(result)
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0] == "trace: a; measured, and the error of simulation"
    cells = [line.replace("  ", "\t").split("\t") for line in lines]
    table = [[cell.strip() for cell in row if cell.strip()] for row in cells]
    assert table[1] == ["policy", "mean", "P50", "P90", "P99"]
    assert table[3] == ["orca", "TTFT", "300 +0.0%", "400 +2.0%", "500 +0.0%", "600 -4.0%"]
    assert table[4] == ["TBT", "700 +0.0%", "800 +0.0%", "900 +0.0%", "1,000 -6.0%"]
    assert [row[0] for row in table[5:7]] == ["TPOT", "end to end"]
    assert lines[11].strip() == "orca: total time 100 +1.0%; throughput 200 -2.0%"
    iterations = "iterations of orca, predicted one by one: with prompts: 3, 1.50 s, in all -1.4%, each 2.1%"
    assert lines[12].strip() == iterations
    assert lines[15].strip() == "ranking: differs: orca; sarathi (apart by 0.0%)"
    assert lines[25].strip() == "ranking: the same"
    shown = [line.removeprefix("  ") for line in lines[26:]]
    assert shown[:3] == [
        "total time      error  2.00% (median)  5.00% (largest), target 3%, MISSED by 1 of 3, most by:",
        "    trace, sarathi: -5.0% (-5.0% to -4.0% as iteration times move by 1%)",
        "throughput      error  1.00% (median)  2.00% (largest), target 3%",
    ]
    missed = [index for index, line in enumerate(shown) if "MISSED" in line]
    assert [shown[index].split(" error")[0].strip() for index in missed] == ["total time", "TTFT P50", "TBT P99"]
    assert shown[-2] == "card 1: all iterations, predicted one by one: with prompts -1.4%"
    assert shown[-1] == WITHIN  # the three figures, two of them of one run


def test_a_percentile_is_right_if_it_lies_next_to_that_of_the_simulation(
    result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The measured P99 of TTFT, 12% off, is the simulation's P99.2; the P50, 20% off, its P47."""
    report.show(result)
    lines = capsys.readouterr().out.splitlines()
    assert "  TTFT P99        error  4.00% (median) 12.00% (largest), target 8%" in lines
    assert "  TTFT P50        error  2.00% (median) 20.00% (largest), target 3%, MISSED by 1 of 3, most by:" in lines
    says = "trace, sarathi: +20.0% (+20.0% to +21.0% as iteration times move by 1%); the measured one is P47.00 of the"
    assert f"      {says} simulated run" in lines


def test_every_pair_of_policies_in_another_order_is_named(
    result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result["ranking"]["pd"]["swapped"] = {"a; b": 0.012, "a; c": 0.1}
    report.show(result)
    assert "  ranking: differs: a; b (apart by 1.2%), a; c (apart by 10.0%)" in capsys.readouterr().out.splitlines()


def test_the_error_of_a_profile_in_brief(result: dict[str, Any]) -> None:
    """No figure of any run is farther off; it says for which batches and loads that holds."""
    assert report.brief_error(result) == "largest error: mean/P50 20%, P90 0%, P99 12%; batch 48, queued"
    runs = [run for policies in result["cases"].values() for run in policies.values()]
    runs[0]["load"], runs[1]["load"], runs[2]["batch"] = 0.45, 0.9, 16
    result["largest_error"] = {"throughput": 0.5, "TTFT mean": 0.038, "TTFT P99": 0.0498, "TBT P99": 0.131}
    assert report.brief_error(result) == "largest error: mean/P50 4%, P99 13%; batch 16-48, load 45-90%"


def test_the_line_of_a_profile(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "today", lambda: "2026-01-02")
    result["cards"] = {"1": {"with prompts": -0.014, "decodes alone": 0.01}, "2": {"with prompts": 0.02}}
    result["measured"] = [
        {"commit": "1a", "trace": "azure.csv.gz"},
        {"commit": "2b", "trace": "azure.csv.gz"},
        {"commit": "1a"},
    ]
    for name in list(result["median_error"]):
        if name not in ("total time", "TTFT P99", "TBT P99"):
            del result["median_error"][name]
    assert report.error_line(result, "bench") == (
        "against 3 real runs of a and b on 2 cards (batch 48, queued; 3 of 3 queued; lengths of azure) by the runtime of "
        "1a and 2b, median error: total time 2.0% (at most 5.0%), TTFT P99 4.0% (at most 12.0%), "
        "TBT P99 6.0% (at most 9.0%); "
        + WITHIN
        + "; iterations, by card: with prompts -1.4% to +2.0%, decodes alone +1.0% to +1.0%; bench, 2026-01-02"
    )


def test_written_comparisons_are_pooled_card_by_card(
    result: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of two cards in one file and one in another: each run counts once. Of capacities, the profile's own speed counts."""
    measured = [{"commit": commit} for commit in ("1a", "2b", "3c")]
    worse = compare.compare([pair("c", "vtc", {"TTFT P90": 0.3}, load=0.9)], SimpleNamespace(name="h200"))  # type: ignore[arg-type]
    cases = {compare.on_card(case, card): runs for card, (case, runs) in enumerate(result["cases"].items(), 1)}
    (tmp_path / "a.json").write_text(json.dumps({**result, "cases": cases, "measured": measured[:2]}))
    errors = {"profile": worse, "card": {**worse, "cases": {}}}
    (tmp_path / "b.json").write_text(json.dumps({"measured": measured[2:], "errors": errors}))
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    [(loop, found)] = stored.pool(files, "h200").items()
    assert loop == "async" and {case: set(runs) for case, runs in found["cases"].items()} == {
        "trace, card 1": {"orca", "sarathi"},
        "pd, card 2": {"orca"},
        "c, card 3": {"vtc"},
    }
    assert found["measured"] == measured and set(found["cards"]) == {"1", "2", "3"}
    assert found["largest_error"] == pytest.approx({**result["largest_error"], "TTFT P90": 0.3})
    assert found["within"]["all runs"] == [1, 4]
    with pytest.raises(ConfigError, match=r"b\.json: no comparison with this profile: .*h200, not h100"):
        stored.pool(files[1:], "h100")


def test_an_older_comparison_says_in_its_cases_how_it_was_served(result: dict[str, Any], tmp_path: Path) -> None:
    runs = {
        "orca": {key: value for key, value in result["cases"]["pd"]["orca"].items() if key not in ("batch", "loop")}
    }
    for case, batch in (("pd", 18), ("unknown", None)):
        path = tmp_path / f"{case}.json"
        path.write_text(json.dumps({"profile": "h200", "measured": [{}], "cases": {case: runs}}))
        if batch:
            run = stored.pool([path], "h200")["async"]["cases"]["pd, card 1"]["orca"]
            assert (run["batch"], run["loop"]) == (batch, "async")
        else:
            with pytest.raises(ConfigError, match=r"unknown\.json: no comparison"):
                stored.pool([path], "h200")


@pytest.mark.parametrize("name", ["h200", "h100"])
def test_a_profile_states_the_errors_of_the_comparisons_that_it_names(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    profile = json.loads((PROFILES / f"{name}.json").read_text())
    [files] = re.findall(r"fidelity measured=(\S+) ", profile["error"])
    found = statement([Path(file) for file in files.split(",")], name)
    stated = {key: profile[key] for key in ("error", "compared")}
    assert _undated(stated) == _undated(found)
    assert profile["compared"].keys() == ({"async", "sync"} if name == "h200" else {"async"})


def _undated(found: dict[str, Any]) -> str:
    return re.sub(r"stamp=on, \d{4}-\d\d-\d\d", "", json.dumps(found))


def test_each_loop_has_its_own_error(result: dict[str, Any], tmp_path: Path) -> None:
    """Two of the runs are of the synchronous loop; of the other, on another card, all figures are off by less."""
    for run in result["cases"]["trace"].values():
        run["loop"] = "sync"
    cases = {"trace, card 1": result["cases"]["trace"], "pd, card 2": result["cases"]["pd"]}
    measured = [{"commit": "1a"}, {"commit": "2b"}]
    (path := tmp_path / "a.json").write_text(json.dumps({**result, "cases": cases, "measured": measured}))
    found = statement([path], "h200")
    assert found["error"].startswith("against 1 real runs of a on 1 card ") and "runtime of 2b," in found["error"]
    sync = found["compared"]["sync"]
    assert sync["error"].startswith("against 2 real runs of a and b on 1 card ") and "runtime of 1a," in sync["error"]
    assert sync["brief"] == "largest error: mean/P50 20%, P90 0%, P99 6%; batch 48, queued"
    assert found["compared"]["async"] == {
        "models": ["a"],
        "gpus": 1,
        "batches": [48, 48],
        "brief": "largest error: mean/P50 0%, P90 0%, P99 12%; batch 48, queued",
    }
