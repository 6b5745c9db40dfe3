"""What a simulated result says of its profile, and of the error that was established."""

from typing import Any

import numpy as np
import pytest
from hand_made import make_record, make_summary
from test_figures_shown import simulated

from cbatch import Request
from cbatch.results.metrics import Served
from cbatch.results.sessions import early_turns
from cbatch.sim import load_profile
from experiments.api import simulate
from experiments.report.conditions import beyond_text
from experiments.report.intervals import few_text
from experiments.report.notes import LACKS, chosen_text, footer_of, given_text, notes_of, origin_of, tail_text
from experiments.report.run_text import run_text
from experiments.settings.compose import compose_run


def test_a_simulated_result_says_with_which_profile_and_how_far_it_may_be_off() -> None:
    parts = ("power (derived)", "host (fallback)")
    origin = "SIMULATED with profile h200 (error: 5%; entries not measured: power (derived), host (fallback))"
    assert origin_of(simulated(not_measured=parts)) == origin
    origin = "SIMULATED with profile h200 (error: 5%; entries not measured: 1 derived, 2 fallback)"
    assert origin_of(simulated(not_measured=[*parts, "head (fallback)"])) == origin
    assert footer_of([simulated(not_measured=parts)], []) == [
        "SIMULATED with profile h200",
        "error: 5%; entries not measured: power (derived), host (fallback)",
    ]
    both = [simulated(not_measured=[*parts, "head (fallback)"]), simulated(), simulated()]
    assert notes_of(both)[:2] == [f"in 2 of 3 runs: {notes_of(both[1:])[0]}", f"in 1 of 3 runs: {origin}"]
    assert footer_of(both, [])[1:3] == [
        "in 2 of 3 runs: error: 5%",
        "in 1 of 3 runs: error: 5%; entries not measured: 1 derived, 2 fallback",
    ]
    other = {"profile": "h100", "error": "error: 9%"}
    assert footer_of([simulated(), simulated(**other), simulated(**other)], ["a note"]) == [
        "in 2 of 3 runs: SIMULATED with profile h100 (error: 9%)",
        "in 1 of 3 runs: SIMULATED with profile h200 (error: 5%)",
        "a note",
    ]
    fitted = origin_of(simulated(times_of="llama-3.1-8b"))
    assert fitted == "SIMULATED with profile h200 (error: 5%; times of llama-3.1-8b, fitted to the model's shape)"
    lines = run_text(make_summary(make_record(), {**simulated(3), "iterations": 5})).splitlines()[1:3]
    outside = "iterations outside the measured range: 3 of 5; their times are extrapolated"
    assert lines == ["SIMULATED with profile h200 (error: 5%)", outside]
    reused = notes_of([simulated(), {**simulated(), "prefixes": True}])[-1]
    assert reused == "prefixes are not reused: every prompt is computed in full, in 1 of 2 runs"
    [_, cache, clients] = notes_of([{**simulated(), "lacks": ["prefix_cache", "clients"]}])
    assert cache.endswith("give prefix_cache=true") and "client" in clients
    early = [{"turns": 30, "arrived": 20, "answered": 9}, {"turns": 10, "arrived": 0, "answered": 0}, {}]
    assert notes_of([{**simulated(), "early_turns": turns} for turns in early])[-1] == (
        "50% of the 40 later turns arrive before the previous answer has ended, 22% even get tokens before (open loop)"
    )
    drained: dict[str, Any] = {"identity": {"metrics.drain_requests": 9}, "requests": 40}
    ends = [{**simulated(), **drained, "closing": closing} for closing in (0, 9, 10, 30)]
    assert notes_of(ends[:2]) == notes_of([simulated()] * 2)
    assert notes_of(ends)[-1] == (
        "30 requests at the end are counted, although fewer and fewer sessions are left: give metrics.drain_requests=30, and serve more"
    )


def test_sessions_are_too_few_where_there_is_a_steady_number() -> None:
    """30 sessions of 8 turns where 90 would be open need six times 240 turns; under overload no number is enough.

    A workload without `steady`, and an open loop of chats, cannot begin with as many.
    """
    counts = [{"number": 30, "turns": 240, "open": open_} for open_ in (30.0, 30.4, 90.0)]
    identity = {"workload.num_requests": 240, "workload.steady": False}
    chat = {**simulated(), "limits": {"batch": 8}, "mean_waiting": 8, "identity": identity}
    few = [{**chat, "sessions": sessions} for sessions in (*counts, {})]
    assert notes_of([few[0], few[3]]) == notes_of([simulated()] * 2)
    said = "30 sessions are too few: about 90 would be open at this rate in the steady state"
    steady = "workload.sessions=90 workload.steady=true to begin with as many"
    assert notes_of(few)[-1] == f"{said}, in 2 of 4 runs: give workload.num_requests=1440 or more, and {steady}"
    for other in ({"workload.num_requests": 240}, {**identity, "workload.closed": False}):
        assert notes_of([{**few[2], "identity": other}])[-1] == f"{said}: give workload.num_requests=1440 or more"
    agents = {**few[2], "identity": {**identity, "workload.num_requests": None, "workload.num_sessions": 30}}
    assert notes_of([agents])[-1] == f"{said}: give workload.num_sessions=180 or more, and {steady}"
    recorded = {**few[2], "identity": {"workload.num_requests": None}}
    assert notes_of([recorded])[-1] == f"{said}: serve more sessions"
    full = "overload: the open sessions have no steady number, and figures depend on how many are served"
    for measure in ({"queue_grows": True}, {"mean_waiting": 9}):
        over = [{**each, **measure} for each in few]
        assert notes_of(over)[-1] == f"{full}, in 3 of 4 runs: give workload.sessions, or a lower rate"
        assert footer_of(over[:1], [])[-1] == full
        opened = {**over[0], "identity": {**identity, "workload.closed": False}}
        assert notes_of([opened])[-1] == f"{full}: give a lower rate"
    assert footer_of([recorded], [])[-1] == said


def test_sessions_are_fewer_than_are_to_be_kept_open() -> None:
    """25 sessions of 200 turns are kept open as 25, not as 300, which need 24 times 200 turns to begin twice as many."""
    counts = [{"number": 25, "turns": 126, "kept": kept} for kept in (25, 26, 300)]
    asked = {**simulated(), "identity": {"workload.num_requests": 200, "workload.steady": True}}
    few = [{**asked, "sessions": of, "queue_grows": True} for of in counts]
    assert notes_of(few[:1]) == notes_of([simulated()]), "under overload, too, the number is steady"
    said = "25 sessions are too few: workload.sessions=300 is never reached, in 2 of 3 runs"
    assert notes_of(few)[-1] == f"{said}: give workload.num_requests=4800 or more, or a smaller workload.sessions"
    assert notes_of([{**few[1], "identity": {}}])[-1].endswith(
        " workload.sessions=26 is never reached: serve more sessions"
    )


def test_a_figure_gives_no_advice() -> None:
    closing = {"closing": 30, "requests": 40}
    footer = footer_of([{**simulated(), **closing, "lacks": [*LACKS]}], [])
    assert len(footer) == 2 + len(LACKS) + 1 and not any("give" in note or "serve" in note for note in footer)
    assert sum(": give " in note for note in notes_of([{**simulated(), **closing, "lacks": [*LACKS]}])) > 9
    assert tail_text([[900]], advise=False) == tail_text([[900]]).removesuffix("; serve 1,000 or more")
    assert few_text([2], advise=False) == few_text([2]).removesuffix("; use seeds=5 or more")


def test_a_figure_states_the_sizes_that_runs_chose() -> None:
    sizes = ({"kv_tokens": "891298 (beside weights)", "backend": "sim (no GPU)"}, {"kv_tokens": "900"}, {})
    abouts = [{"chosen": {**chosen, "block_size": "128"}} for chosen in sizes]
    assert chosen_text(abouts) == "chosen: kv_tokens=900 to 891,298, block_size=128"
    assert chosen_text([{}]) == ""


def test_a_figure_states_the_settings_of_the_workload_that_all_runs_were_given() -> None:
    """Not what varies, which labels have, nor a seed, nor what a heading states; paths by their last part."""
    same = ["batch=4", "workload.max_pause=10", "workload.path=/a/b.csv", "workload.speed=6", "workload.arrivals=null"]
    same += ["++workload.arrivals={rate:4}", "workload='agents(sessions=8)'"]
    abouts = [
        {"overrides": [*same, f"workload.turns={turns}", f"workload.seed={turns}", "workload.seed=1"]}
        for turns in (2, 3)
    ]
    said = "workload: max_pause=10, path=b.csv, arrivals={rate:4}, sessions=8"
    assert given_text(abouts, ("workload.speed",)) == said
    assert given_text([{"overrides": ["batch=4"]}, {}]) == ""


def test_objectives_in_milliseconds_are_told_their_unit() -> None:
    """500 and 50, meant as milliseconds, are minutes; 60 s to the first token and an hour less a second in all are of batch jobs."""
    keys = {
        "workload.slo.ttft": 500.0,
        "workload.slo.tbt": 50.0,
        "metrics.objectives.total": None,
        "workload.ttft": 900,
    }
    said = "objectives are in seconds: workload.slo.ttft=500, workload.slo.tbt=50: give 0.5 for 500 ms"
    assert notes_of([{**simulated(), "identity": keys}])[-1] == said
    batch = {"workload.tiers.slow.slo.ttft": 60.0, "workload.tiers.slow.slo.total": 3599.0}
    assert notes_of([{**simulated(), "identity": batch}]) == notes_of([simulated()])


def test_seeds_whose_caches_differ_are_told_how_to_make_them_equal() -> None:
    """As activations for the longest request drawn are set aside; a batch of 8 is another setting, not a replication."""
    runs = ((0, 4, 400), (1, 4, 300), (0, 8, 100), (1, 8, 100))
    abouts = [
        {
            **simulated(),
            "identity": {"batch": batch, "workload.seed": seed},
            "chosen": {"p.kv_tokens": f"{size} (beside weights)"},
        }
        for seed, batch, size in runs
    ]
    said = "seeds differ in the KV cache, 300 to 400 tokens: give kv_tokens, or max_tokens, which follows the longest request drawn"
    assert notes_of(abouts)[-1] == said
    assert notes_of(abouts[1:]) == notes_of([simulated()] * 3)


def test_early_turns_are_those_before_the_answer_in_their_prompt() -> None:
    """Session a: its second turn comes before the end of the first, and is answered after it; its third is wholly early.

    Session b's second turn has no room for the first; a request without a session has no turns.
    """
    rows = [
        ("a", 0, 1, 5, 10, 4),
        ("a", 4, 6, 9, 20, 4),
        ("a", 5, 7, 9, 30, 2),
        ("b", 0, 1, 8, 9, 3),
        ("b", 1, 2, 3, 11, 2),
    ]
    rows += [(None, 0, 1, 5, 10, 4), (None, 0, 1, 5, 90, 4)]
    sessions, *columns = zip(*rows, strict=True)
    ended = [Request(id_, 1, 1, session=session) for id_, session in enumerate(sessions)]
    arrival, first, last, prompts, outputs = map(np.array, columns)
    served = Served(np.arange(7), arrival, arrival, first, last, prompts, outputs, *np.zeros((4, 0)))
    assert early_turns(ended, served) == {"turns": 2, "arrived": 2, "answered": 1}
    assert early_turns(ended[5:], served) == {}


def test_a_result_says_where_the_error_of_its_profile_was_not_established() -> None:
    """For other batches or shares of B3 than the compared ones, and where more requests wait than may run.

    `workload.load` is a share of B3, and `loads` are shares of what a policy serves, which is less: 45% of B3 may be 70% of it.
    """

    def of(
        batch: int, waiting: float = 0.0, compared: tuple[int, ...] = (16, 128), load: float | None = None
    ) -> dict[str, Any]:
        about = simulated(compared={"batches": [*compared], "loads": [0.6, 0.7], "shares_of_bound": [0.45, 0.9]})
        known = load and {"load": load, "rate": 3.0}
        return {**about, "limits": {"batch": batch}, "mean_waiting": waiting, "load": known}

    assert beyond_text([of(16), of(128, waiting=128.0), {"simulated": False}, simulated()]) == ""
    assert beyond_text([of(8, compared=())]) == ""  # nothing was compared, as the line above it says
    assert beyond_text([of(129, waiting=130.4)]).endswith(
        "batch 129; overload, 130 requests waiting on average until the last arrival"
    )
    grown = {**of(64, waiting=19.6), "queue_grows": True}
    assert beyond_text([grown, of(64)]).endswith(
        ": overload in 1 of 2 runs, at most 20 requests waiting on average until the last arrival"
    )
    assert beyond_text([of(64, load=0.45), of(64, load=0.9)]) == ""
    queued = {**of(64), "queued": True}
    assert beyond_text([queued]) == "outside the conditions of that error: all requests queued from the start"
    assert beyond_text([queued, of(64)]).endswith(": all requests queued from the start in 1 of 2 runs")
    assert (
        beyond_text([of(64, load=0.2)])
        == "outside the conditions of that error: offered rate 20% of B3 (compared: 45% to 90%)"
    )
    assert beyond_text([of(64, load=0.2), of(64), of(64, load=0.95)]).endswith(
        ": offered rate 20%, 95% of B3 (compared: 45% to 90%) in 2 of 3 runs"
    )
    assert beyond_text([of(number) for number in (4, 8, 256, 512)]).endswith(": batch 4 to 512")
    assert beyond_text([of(8), of(8), of(256), of(64, waiting=65.0), of(64, waiting=1000.0)]) == (
        "outside the conditions of that error: batch 8, 256 in 3 of 5 runs; "
        "overload in 2 of 5 runs, at most 1,000 requests waiting on average until the last arrival"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", ""),
        ("backend.tensor_parallel=2 prefix_cache=false drafting=goodput", ""),
        ("prefix_cache=true", "prefix cache"),
        ("prefix_cache=true kv.host_tokens=1000", "prefix cache; host memory"),
        ("drafter=glm_dspark drafting=goodput", "drafts"),
        ("drafter=model drafter.model=llama-3.2-1b drafter.alpha=0.8 drafting=fixed", "drafts"),
        ("backend.replicas=4", "several replicas"),
        ("prefix_cache=true backend.pools={p:{role:prefill},d:{role:decode}}", "prefix cache; several replicas; roles"),
        ("backend.pools={a:{},b:{pipeline_stages:2}}", "several replicas; pipeline stages"),
        ("backend.pipeline_stages=2", "pipeline stages"),
        ("backend.host_seconds=measured backend.server_seconds=0.1", "planning time; server_seconds"),
    ],
)
def test_a_result_names_what_the_compared_runs_did_not_use(given: str, said: str) -> None:
    identity = compose_run("policy=sarathi_serve", "backend=sim", "hardware=h100", *given.split()).identity
    about = {**simulated(compared={"batches": [48, 48], "loads": []}), "limits": {"batch": 48}, "identity": identity}
    assert beyond_text([about]).removeprefix("outside the conditions of that error: ") == said


@pytest.mark.parametrize(
    ("policy", "num_eager", "pools"),
    [("orca", 1, {}), ("sarathi_serve", 0, {}), ("orca", 1, {"a": {"role": "prefill"}, "b": {"role": "decode"}})],
)
def test_a_run_states_the_error_of_runs_that_launch_as_it_does(
    policy: str, num_eager: int, pools: dict[str, Any]
) -> None:
    """Three prompts of 960 tokens at once fit no graph of 2,048 tokens; in chunks of 512 all do."""
    keys = {"hardware": "h200", "model": "llama-3.1-8b", "batch": 3} | ({"chunk": 512} if policy != "orca" else {})
    keys |= {"backend.pools": pools, "prefix_cache": True} if pools else {}
    about = simulate(policy, **keys, **{"workload.num_requests": 3}).summary["about"]
    stated = load_profile("h200").compared["async" if num_eager else "async, in graphs"]
    assert about["execution"]["eager_iterations"] == num_eager
    assert about["execution"]["error"] == stated.text and about["execution"]["compared"]["in_graphs"] == (not num_eager)


def test_a_drafter_that_drafts_nothing_is_within_the_conditions() -> None:
    about = {
        **simulated(compared={"batches": [], "loads": []}),
        "limits": {"batch": 8},
        "identity": {"drafter": "ngram"},
    }
    assert beyond_text([about]) and not beyond_text([{**about, "lacks": ["drafts"]}])


def test_each_pool_has_its_batch_and_the_queue_is_of_all() -> None:
    """Two replicas of 48 and one of 8 hold 104 requests."""
    pools = {name: {"limits": {"batch": batch}, "replicas": of} for name, batch, of in (("a", 48, 2), ("b", 8, 1))}
    about = {**simulated(compared={"batches": [48, 48], "loads": []}), "limits": {}, "pools": pools}
    assert beyond_text([{**about, "mean_waiting": 104}]).endswith(": batch 8")
    assert beyond_text([{**about, "mean_waiting": 105}]).endswith(
        ": batch 8; overload, 105 requests waiting on average until the last arrival"
    )
