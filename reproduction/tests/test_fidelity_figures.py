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
from test_figures import FIGURES

from cbatch import SLO, BatchShape, ConfigError, Request
from cbatch.sim import PROFILES, load_profile
from cbatch.sim.profile_file import make_profile
from cbatch.sim.provenance import IN_GRAPHS
from cbatch.sim.times import StageTimes
from reproduction.validation import compare, stored
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
GOLD: Any = {"tier": "gold", "slo": SLO(ttft=4.0, total=9.0)}
ASKED = [Request(0, 5, 3, arrival_time=0.25, **GOLD), Request(1, 7, 2, arrival_time=1.5), Request(3, 3, 1, **GOLD)]


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


def test_a_run_is_kept_in_microseconds_from_its_first_plan(served: ServedRun) -> None:
    expected = {
        "request.prompt": [5, 7, 3],
        "request.output": [3, 2, 1],
        "request.true_output": [0, 0, 0],
        "request.tier": [0, -1, 0],
        "request.arrival": [250_000, 1_500_000, 0],
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
    again = served.requests()
    for name in ("num_prompt_tokens", "max_new_tokens", "arrival_time", "tier", "slo"):
        assert [getattr(each, name) for each in again] == [getattr(each, name) for each in ASKED], name


def test_the_device_works_and_pauses_in_turn(served: ServedRun) -> None:
    """An iteration launched early begins when the one before it ends."""
    working, pauses = served.device_seconds()
    assert (working.tolist(), pauses.tolist()) == ([1.75, 1.5, 2.0, 2.5, 0.5], [0, 0.5, 1.0, 0.5, 0.5])
    early = ServedRun({}, {}, {"step.started": np.array([10, 15, 35]), "step.ended": np.array([20, 30, 40])})
    working, pauses = early.device_seconds()
    assert (working * 1e6).tolist() == pytest.approx([10, 10, 5])
    assert (pauses * 1e6).tolist() == pytest.approx([0, 0, 5])


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
    monkeypatch.setattr(compare, "cost_of", Cost)
    found = compare.iteration_errors(served, SimpleNamespace())  # type: ignore[arg-type]
    total = (1.1 * (1.75 + 1.5 + 2.0) + 2.5) / (1.75 + 1.5 + 2.0 + 2.5) - 1
    assert found == {
        "with prompts": {"number": 4, "seconds": 7.75, "total": pytest.approx(total), "median": pytest.approx(0.1)},
        "decodes alone": {"number": 1, "seconds": 0.5, "total": pytest.approx(-0.2), "median": pytest.approx(0.2)},
    }


def pair(case: str, policy: str, errors: dict[str, float], nudges: tuple[float, ...] = (), **settings: Any) -> Pair:
    """A run that measured 100, 200, ... and whose simulation is off by these errors, and by these more if nudged."""
    measured = {name: 100.0 * (place + 1) for place, name in enumerate(NAMES)}
    simulated = {name: measured[name] * (1 + errors.get(name, 0.0)) for name in NAMES}
    nudged = [{name: measured[name] * nudge + value for name, value in simulated.items()} for nudge in nudges]
    columns = {"request.prompt": np.zeros(40)}
    run = ServedRun({"case": case, "policy": policy, "model": "a", "batch": 48, **settings}, measured, columns)
    return Pair(run, simulated, {"TTFT P50": 47.0, "TTFT P99": 99.2}, nudged)


@pytest.fixture(autouse=True)
def runs_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of runs made by hand are not known."""
    monkeypatch.setattr(compare, "share_of_bound", lambda run, profile: None)


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
    profile: Any = load_profile("h200")
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
    profile: Any = load_profile("h200")
    wrong = {"total time": 0.04, "throughput": 0.04, "TPOT mean": 0.04}
    open_loop = pair("poisson", "orca", wrong, load=0.9)
    found = compare.compare([open_loop, pair("queued", "orca", {"TPOT mean": 0.02})], profile)
    largest = found["largest_error"]
    assert (largest["total time"], largest["throughput"], largest["TPOT mean"]) == pytest.approx((0, 0, 0.04))
    assert "total time" not in compare.compare([open_loop], profile)["median_error"]


def test_iterations_of_several_cards_are_added_up_card_by_card() -> None:
    """Card 1: 1 s + 10% and 3 s - 2% are 4.04 s predicted, 1% more than measured."""

    def run(seconds: float, total: float) -> dict[str, Any]:
        return {"orca": {"iterations": {"decodes alone": {"seconds": seconds, "total": total}}}}

    cases = {"pd, card 1": run(1, 0.1), "queued, card 1": run(3, -0.02), "pd, card 2": run(2, -0.5)}
    assert compare.cards(cases) == {"1": {"decodes alone": pytest.approx(0.01)}, "2": {"decodes alone": -0.5}}
    assert (compare.card_of(compare.on_card("pd", 2)), compare.card_of("pd")) == (("pd", "2"), ("pd", "1"))
    assert compare.cards({"pd": run(1, 0.1)}) == {"1": {"decodes alone": pytest.approx(0.1)}}


def test_written_comparisons_are_pooled_card_by_card(
    result: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two cards in one file and one in another: each run counts once. Capacities count at the profile's own speed."""
    measured = [{"commit": commit} for commit in ("1a", "2b", "3c")]
    worse = compare.compare([pair("c", "vtc", {"TTFT P90": 0.3}, load=0.9)], load_profile("h200"))
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
    worse["cases"]["c"]["vtc"]["eager_iterations"] = 7
    files[1].write_text(json.dumps({"measured": measured[2:], "errors": errors}))
    inside = stored.pool(files, "h200")[f"async{IN_GRAPHS}"]
    assert inside["cases"] == {case: runs for case, runs in found["cases"].items() if case != "c, card 3"}
    assert inside["measured"] == measured[:2] and inside["largest_error"] == pytest.approx(result["largest_error"])
    with pytest.raises(ConfigError, match=r"b\.json: no comparison with this profile: .*h200, not h100"):
        stored.pool(files[1:], "h100")
    files[0].write_text(json.dumps({**result, "tables": "others"}))
    with pytest.raises(ConfigError, match=r"a\.json: .*simulated with other tables of h200"):
        stored.pool(files, "h200")


@pytest.mark.parametrize("name", [name for name in ("h200", "h100", "h100-vllm") if load_profile(name).compared])
def test_a_profile_states_the_errors_of_the_comparisons_that_it_names(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    stated = load_profile(name).compared
    [see] = {known.see for known in stated.values()}
    given = dict(re.findall(r"(measured|jobs)=(\S+)", see))
    files, jobs = [*map(Path, given["measured"].split(","))], given["jobs"].split(",") if "jobs" in given else []
    content = json.loads((PROFILES / f"{name}.json").read_text()) | statement(files, name, jobs)
    found = make_profile(content).compared
    assert stated == {loop: replace(known, date=stated[loop].date) for loop, known in found.items()}
    loops = {"async", "sync", "async, 2 GPUs"} if name == "h200" else {"async"}
    assert stated.keys() == (
        loops if name.endswith("vllm") else {loop + end for loop in loops for end in ("", IN_GRAPHS)}
    )
    assert all(known.in_graphs == loop.endswith(IN_GRAPHS) for loop, known in stated.items())
