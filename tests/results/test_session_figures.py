"""Figures of sessions in closed loop, of a run made by hand and of one whose cache loses nothing."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made import end, make_summary

from cbatch import ConfigError, CostFunction, FinishReason, KVSize, Limits, Request, RunRecord, Server, StepRecord
from cbatch.results.metrics import collect_served
from cbatch.results.sessions import sessions_open
from cbatch.results.summary import summarize
from cbatch.sim import SimExecutor
from experiments.api import simulate
from experiments.report.headings import check_figure, heading_of
from experiments.report.notes import notes_of
from experiments.report.run_text import run_text
from experiments.store.csv_tables import RunTables, stated_columns
from experiments.workloads import AllAtOnce, Chat, UniformLengths
from policies.evictions import LRU
from policies.orca import Orca

SIZES: dict[str, Any] = {"num_blocks": 20, "max_batch": 4}
MAIN, AGENT, WARM = ((0, 0), (1, 4)), ((0, 0), (3, 4)), ((0, 0), (9, 4))
TURNS: list[
    tuple[Any, ...]
] = [  # session, turn, last, texts; arrival, end; prompt and output tokens; found in the cache
    ("warm", 0, False, WARM, 0.0, 0.0, 12, 1, 0),  # stands for all its turns before the run
    ("left", 0, False, (), 0.0, 1.0, 9, 1, 0),
    ("main", 0, False, MAIN, 0.0, 2.0, 10, 4, 0),
    ("warm", 1, True, WARM, 2.0, 3.0, 16, 1, 8),  # 12 of the first turn's 12 tokens could be found
    ("short", 0, True, (), 1.0, 4.0, 9, 1, 0),
    (
        "main",
        1,
        False,
        MAIN,
        5.0,
        6.0,
        20,
        2,
        8,
    ),  # 12 of 13: one token of a block of 4, and the answer's last never entered
    ("main", 2, False, AGENT, 4.0, 8.0, 9, 1, 4),  # a sub-agent with the system's 4 tokens
    ("left", 1, True, (), 8.0, 9.0, 19, 0, 0),  # its client leaves
    ("cut", 6, True, (), 8.0, 10.0, 9, 1, 0),  # began before the run
    ("open", 0, False, (), 9.0, 11.0, 9, 1, 0),  # its next turn never comes
    ("main", 3, True, MAIN, 10.0, 13.0, 25, 1, 0),  # 20 of 21
]


def make_record() -> RunRecord:
    """Each served turn gets its only token at its end."""
    record = RunRecord()
    for id_, (session, turn, last, texts, arrival, finished, prompt, output, found) in enumerate(TURNS):
        stated = {"session": session, "turn": turn, "last": last, "texts": texts, "pause": 3.0 * turn}
        request = Request(id_, prompt, 4, arrival_time=arrival, **stated)
        why = FinishReason.LENGTH if output else FinishReason.CANCELLED
        counts = {"num_output_tokens": output, "num_cached_tokens": found, "token_times": (finished, finished)}
        record.requests.append(end(request, arrival if output else None, finished, why, **counts))
        times, served = (arrival, arrival, arrival, finished, finished, arrival, finished), bool(output)
        step = StepRecord(id_, *times, 1, prompt, 0, 0, int(served), 0, 1, 0, 1, note="")
        record.add_step(step, np.array([id_] * served, int))
    return record


def figures(**options: Any) -> dict[str, Any]:
    found: dict[str, Any] = summarize(make_record(), **SIZES, **options)["sessions"]
    return found


def test_figures_of_sessions() -> None:
    """main takes 13 s: a turn is unfinished from 0 to 2, from 4 to 8 and from 10 to 13; short has one turn of 3 s."""
    found = figures(num_warming=1, num_evicted_blocks=0, block_size=4)
    assert (found["completed"], found["abandoned"]) == (2, 1)
    whole, begun_before = 4 + 1, 1 + 1  # turns: of main and short, 2.5 on average; of warm and cut
    assert found["per_hour"] == pytest.approx((whole + begun_before) / 2.5 * 3600 / 13)
    assert [found[f"{of}_seconds"]["mean"] for of in ("job", "busy", "turn")] == [
        (13 + 3) / 2,
        (9 + 3) / 2,
        (9 / 4 + 3) / 2,
    ]
    assert found["job_seconds"]["geometric_mean"] == pytest.approx((13 * 3) ** 0.5)
    assert found["job_seconds"]["p90"] == pytest.approx(3 + 0.9 * 10)
    assert found["jain_index"] == pytest.approx((9 / 4 + 3) ** 2 / (2 * ((9 / 4) ** 2 + 3**2)))
    assert found["cache_lost_share"] == pytest.approx(((12 - 8) + (12 - 8) + 0 + 20) / (12 + 12 + 4 + 20))


def test_sessions_open_in_the_steady_state_are_their_rate_times_their_duration() -> None:
    """Two begin per second, and last 3, 4 and 8 s, 5 s on average; turns may end in any order."""
    turns = [("a", 0, 0.0, 1.0), ("a", 1, 2.0, 3.0), ("b", 0, 0.5, 4.5), ("c", 1, 8.0, 9.0), ("c", 0, 1.0, 1.5)]
    ended = [
        end(Request(id_, 1, 1, session=session, turn=turn, arrival_time=arrival), arrival, at)
        for id_, (session, turn, arrival, at) in enumerate(turns)
    ]
    assert sessions_open(ended) == {"number": 3, "turns": 5, "open": pytest.approx(2 * 5)}
    assert sessions_open(ended[:2]) == sessions_open([]) == {}
    assert sessions_open(ended, 4) == {"number": 3, "turns": 5, "kept": 4}


@pytest.mark.long
def test_geometric_means_compare_session_by_session() -> None:
    """Both policies serve the same sessions, as a closed loop numbers its turns: the first 5 are continued, and no whole jobs."""
    keys: dict[str, Any] = {"sessions": 5, "steady": True, "requests": 60, "turns": 4, "pause": 0.1, "batch": 2}
    jobs, means = [], []
    for policy in ("orca", "sarathi_serve"):
        result = simulate(policy, "chat", **keys)
        by_session = result.requests[5:].groupby("session")
        job = by_session["last_token"].max() - by_session["arrival"].min()
        jobs.append(job[~job.index.isin(result.requests["session"][:5])])
        means.append(result.summary["sessions"]["job_seconds"]["geometric_mean"])
    assert len(jobs[0]) == 10 and jobs[0].index.equals(jobs[1].index)
    assert means[1] / means[0] == pytest.approx(np.exp(np.log(jobs[1] / jobs[0]).mean()))


@pytest.mark.parametrize("steady", [True, False])
@pytest.mark.parametrize("drained", [0, 1])
def test_a_closed_loop_counts_the_requests_that_end_with_fewer_sessions(drained: int, steady: bool) -> None:
    """No session begins after them. A note names the setting that leaves them out, unless it does."""
    keys: dict[str, Any] = {"sessions": 3, "steady": steady, "requests": 40, "turns": 4, "pause": 0.1, "batch": 2}
    keys["lengths"] = {"min_length": 8, "max_length": 16}
    frame = simulate("orca", "chat", **keys).requests
    closing = int((frame["last_token"] > frame[3 * steady :].groupby("session")["arrival"].min().max()).sum())
    result = simulate("orca", "chat", **keys, metrics={"drain_requests": closing * drained})
    assert 0 < result.summary["about"]["closing"] == closing
    note = f"\n{closing} requests at the end are counted, although fewer and fewer sessions are left: give metrics.drain_requests={closing}\n"
    assert (note in str(result)) != drained
    at_once = simulate("orca", "chat", **{**keys, "sessions": 10})
    assert "fewer sessions are left: serve more\n" in str(at_once), "all ten begin at once"
    resumed = f"; the first 3 compute what sessions said before, so that there are {len(frame)} and not 40 requests\n"
    assert (resumed in str(result)) == steady


@pytest.mark.parametrize("drained", [2, 3])
def test_a_report_says_how_many_turns_never_came_and_why_none_counts(drained: int) -> None:
    """One request at a time takes 20 ms: of three sessions of four turns, two leave after 30 ms, at their first turns."""
    keys: dict[str, Any] = {"sessions": 3, "requests": 12, "turns": 4, "pause": 0.1, "batch": 1, "timeout": 0.03}
    metrics = {"warmup_requests": 1, "drain_requests": drained}
    keys |= {"system": 0, "lengths": {"min_length": 8, "max_length": 9}, "metrics": metrics}
    result = simulate("orca", "chat", **keys)
    lines = str(result).splitlines()
    left, never = "requests whose client left", "turns that never came, as their sessions ended early"
    assert [line for line in lines if line.startswith((left, never))] == [f"{left}: 2 of 6", f"{never}: 6 of 12"]
    assert result.summary["run"]["counted_requests"] == 4 - 1 - drained
    none = f"metrics.warmup_requests=1 and metrics.drain_requests={drained} leave none of 4 served requests: lower them"
    assert (none in lines) == (drained == 3)
    abouts = [result.about, {**result.about, "left_out": 0, "cancelled": 0, "never_came": 0}]
    both = [f"{none.removesuffix(': lower them')}, in 1 of 2 runs: lower them"] * (drained == 3)
    both += [f"{left}: 2 of 12, in 1 of 2 runs", f"{never}: 6 of 18, in 1 of 2 runs"]
    assert notes_of(abouts)[-len(both) :] == both
    assert not any(never in note for note in notes_of(abouts[1:]))


def test_time_to_first_token_by_turn() -> None:
    """The turns of a session that the warming request continues have other numbers than in the session."""
    found = {turn: (of["turns"], of["mean"]) for turn, of in figures(num_warming=1)["ttft_seconds"].items()}
    assert found == {"0": (4, (1 + 2 + 3 + 2) / 4), "1": (1, 1.0), "2-3": (2, (4 + 3) / 2), "4-7": (1, 2.0)}


def test_sessions_count_by_their_begins() -> None:
    """Without the last five ends the window is 0 to 4 s: main begins in it, and takes 13 s. Warm and short, which end in it, take 3 s each."""
    early = figures(drain_requests=5)
    assert early["completed"] == 3 and early["job_seconds"]["mean"] == pytest.approx((13 + 3 + 3) / 3)
    ended, turns = 1 + 2 + 1, 4 + 2 + 1  # of main, warm and short: in the window, and all
    assert early["per_hour"] == pytest.approx(ended / (turns / 3) * 3600 / 4)
    assert figures(warmup_requests=2)["job_seconds"]["mean"] == 3, "from 1 s on only short begins, at 1 s, and ends"
    assert figures(warmup_requests=4, num_warming=1, drain_requests=1)["completed"] == 0
    assert figures()["completed"] == 3
    assert "cache_lost_share" not in figures()


@pytest.mark.parametrize(("served", "begins"), [((True, True), 1.5), ((True, False), 1.0), ((False, False), 0.5)])
def test_warming_requests_that_are_rejected_do_not_shift_the_measured_part(
    served: tuple[bool, bool], begins: float
) -> None:
    """Two arrive at 0 and end at 1 and 1.5 s, or are rejected at 0.5 s. The session after a rejected one begins at once."""
    record = RunRecord()
    rows = [(id_, 0.0, 1.0 + 0.5 * id_ if good else 0.5, good) for id_, good in enumerate(served)]
    for id_, arrival, finished, good in sorted(
        [*rows, (2, 0.5, 0.75, True), (3, 1.5, 2.0, True), (4, 1.5, 3.0, True)], key=lambda row: row[2]
    ):
        why = FinishReason.LENGTH if good else FinishReason.REJECTED
        request = Request(id_, 4, 1, arrival_time=arrival, session=str(id_), turn=0, pause=0.0, last=True)
        record.requests.append(
            end(
                request,
                arrival if good else None,
                finished,
                why,
                num_output_tokens=int(good),
                token_times=(finished, finished),
            )
        )
        step = StepRecord(
            id_,
            *(arrival, arrival, arrival, finished, finished, arrival, finished),
            1,
            4,
            0,
            0,
            int(good),
            0,
            1,
            0,
            1,
            note="",
        )
        record.add_step(step, np.array([id_] * good, int))
    found = summarize(record, **SIZES, num_warming=2)
    assert found["run"]["counted_seconds"] == 3.0 - begins
    ends = [time for time in (0.75, 2.0, 3.0) if time > begins]
    assert found["run"]["counted_requests"] == found["sessions"]["completed"] == len(ends)
    after = summarize(record, **SIZES, num_warming=2, warmup_requests=1)
    assert after["run"]["counted_seconds"] == 3.0 - ends[0]


def test_warming_requests_alone_are_no_session() -> None:
    found = figures(num_warming=len(TURNS), num_evicted_blocks=0)
    assert (found["completed"], found["abandoned"], found["ttft_seconds"]) == (0, 0, {})
    assert np.isnan([found["cache_lost_share"], found["jain_index"], found["job_seconds"]["mean"]]).all()


def test_an_open_loop_has_no_figures_of_sessions() -> None:
    record = RunRecord()
    record.requests = [end(Request(0, 1, 1, session="a", turn=0), None, 1.0, FinishReason.REJECTED)]
    assert "sessions" not in summarize(record, **SIZES)


def test_sessions_in_the_report() -> None:
    summary = make_summary(make_record(), num_warming=1, num_evicted_blocks=0, block_size=4)
    text = run_text(summary)
    assert "sessions    2 completed, 1 abandoned, 775 per hour; Jain's index 0.98\n" in text
    assert " per second offered\n" in text, "as the table's heading"
    assert "job time    8 s on average, 6 s of them without pauses, 2.62 s per turn\n" in text
    assert (
        "repeated    58.3% of the tokens that turns repeat were not found in the prefix cache where they ran\n" in text
    )
    begun = run_text(make_summary(make_record(), num_warming=len(TURNS), num_evicted_blocks=0))
    assert (
        "sessions    0 completed, 0 abandoned: no times of jobs, as no session begins in the measured part and" in begun
    )
    assert "job time" not in begun and "per hour" not in begun
    table = text.split("\n\n")[-1].splitlines()
    assert table[2].split() == ["0", "(4", "requests)", "2", "2", *"---"]
    summary["sessions"]["ttft_seconds"]["0"]["turns"] = 150
    assert "only 150 requests in turn 0;" in run_text(summary), "of the turns of one number"
    keys = ("sessions.job_seconds.p90", "sessions.ttft_seconds.2-3.mean", "sessions.cache_lost_share", "regret.latency")
    heads = ("job time P90 [s]", "mean TTFT of turn 2-3 [s]", "repeated, not found [%]", "latency / bound")
    assert tuple(heading_of(key).text for key in keys) == heads and {heading_of(key).better for key in keys} == {
        "lower"
    }
    of_names = ("prefix_cache.clients.ann.hit_share", "clients.a.b.tpot_seconds.p50", "pools.p.cost.dollars")
    for key in (*keys, *of_names, "drafts.accepted_share", "drafts.survivals.2", "energy.at_limit_share"):
        check_figure(f"metric={key}")
    with pytest.raises(ConfigError, match=r"sessions\.job_seconds"):
        check_figure("metric=sessions.job_second.mean")
    others = ("clients.ann.run.seconds", "clients.ann.tbt_seconds.p99", "pools.p.sessions.per_hour", "clients.share")
    for key in (*others, "clients.ann.ttft_second.p99", "attainment.tiers.gold.shares", "tiers.gold.share"):
        with pytest.raises(ConfigError, match="no such number; did you mean"):
            check_figure(f"metric={key}")


def test_turns_and_pauses_in_requests_csv(tmp_path: Path) -> None:
    record = make_record()
    with RunTables(tmp_path, (), stated_columns(cached=True, paused=True)) as tables:
        tables.write(record, collect_served(record))
    lines = (tmp_path / "requests.csv").read_text().splitlines()
    rows = {row["id"]: row for row in csv.DictReader(lines)}
    assert [rows["10"][name] for name in ("session", "turn", "pause", "cached_tokens")] == ["main", "3", "9.0", "0"]


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_cache_that_holds_everything_loses_nothing(block_size: int) -> None:
    chat = Chat(num_requests=90, turns=(1, 9), sessions=5, steady=True, system=21, pause=5.0, arrivals=AllAtOnce(),
                lengths=UniformLengths(min_length=3, max_length=40, pd_ratio=1))  # fmt: skip
    second = CostFunction(lambda shape: 1.0)
    kv, limits, arrivals = KVSize(100_000, block_size), Limits(64, 640, 10_000), chat.source(None)
    record = Server(SimExecutor(second), limits, second, kv, prefix_cache=LRU()).engine(Orca(), arrivals).run()
    options: dict[str, Any] = {"num_warming": 5, "num_evicted_blocks": 0, "block_size": block_size}
    found = summarize(record, **SIZES, **options)["sessions"]
    begun = {each.session for each in record.requests} - {each.session for each in record.requests[:5]}
    assert (found["cache_lost_share"], found["abandoned"], found["completed"]) == (0.0, 0, len(begun))
