"""Capacity as the most concurrent sessions: the rules by hand, and searches on curves that are known."""

import json
from functools import partial
from math import log
from pathlib import Path
from typing import Any

import pytest
from curve import Curve
from in_process import outcome
from test_capacity import SMALL, run, simulate_curve
from test_capacity import folder as folder
from test_search import search

from cbatch import ConfigError, Request
from experiments.capacity import __main__ as command
from experiments.capacity.search import LEAST
from experiments.capacity.simulation import _while_full
from experiments.compare import pairs_of
from experiments.run import main
from experiments.settings.compose import compose
from experiments.settings.construct import construct
from experiments.store.replications import read_replications
from experiments.trials.replications import at_a_time


def test_turns_that_arrive_while_all_sessions_run_count() -> None:
    """Ids 0 and 1 warm up, 2 is left out as well; session c begins last, at 5 s, and has no successor when it ends."""
    arrivals = [("a", 0, 0.0), ("b", 0, 0.0), ("a", 1, 2.0), ("b", 1, 3.0), ("c", 0, 5.0), ("b", 2, 4.0), ("c", 1, 6.0)]
    requests = [
        Request(id_, 1, 1, session=session, turn=turn, arrival_time=arrival)
        for id_, (session, turn, arrival) in enumerate(arrivals)
    ]
    assert [request.id for request in _while_full(requests, 3)] == [3, 5, 4]


def test_more_sessions_at_a_time_begin_with_the_same_ones() -> None:
    chat: Any = construct("workload", compose("workload=chat", name="capacity").keys["workload"])
    firsts = [
        [request.num_prompt_tokens for request in at_a_time(chat, number, sessions, 100).source(None).due(0.0, 0)]
        for number, sessions in ((0, 3), (0, 5), (1, 5))
    ]
    assert firsts[0] == firsts[1][:3] and len(firsts[1]) == 5 and firsts[1] != firsts[2]


@pytest.mark.parametrize(("first", "recorded"), [(8, False), (1, True), (100, False)])
def test_a_search_over_sessions_tries_whole_numbers(first: int, recorded: bool) -> None:
    """Between 6 and 7 sessions the logarithm of the violations is linear. Requests grow with the sessions, except for recorded ones."""
    curve, requests = Curve(lambda sessions: 0.01 * (sessions / 6.5) ** 5), 100_000 if recorded else 50_000
    capacity = search(curve, requests=requests, per_session=10_000.0, first=first, grows=not recorded)
    assert capacity.rate == pytest.approx(6 + log(6.5 / 6) / log(7 / 6), abs=0.01)
    assert capacity.low <= capacity.rate <= capacity.high and capacity.warmup == 5 * 6
    assert all(sessions == int(sessions) for _, sessions in curve.pairs)
    assert len(set(curve.pairs[-LEAST:])) == LEAST, "nothing is simulated twice"
    assert capacity.requests == (100_000 if recorded else 6 * 10_000)
    grown = {max(50_000, 10_000 * sessions) for sessions in range(101)}
    assert {size for size, _ in curve.sizes} <= ({100_000} if recorded else grown)


@pytest.mark.parametrize(
    ("violations", "problem"),
    [(0.3, "slo: no number of sessions meets it"), (0.0, "even 5000 sessions at a time meet .*; give requests=7")],
)
def test_sessions_that_all_fail_or_pass_are_refused(violations: float, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        search(Curve(lambda sessions: violations), per_session=20.0, more="requests=7")


def test_the_most_sessions_that_requests_allow_are_said_before_the_search(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 requests for each: 75 sessions of 1,500 requests. The error names the key and twice the number."""
    simulate_curve(monkeypatch, Curve(lambda sessions: 0.0))
    kept = [key for key in SMALL.split() if not key.startswith(("requests=", "workload="))]
    ended = outcome(
        partial(main, command=command.COMMAND), [*kept, "workload=chat", "workload.turns=4", "requests=1500"]
    )
    first, second = ended.printed.splitlines()[:2]
    assert first == "1,500 requests in a replication allow at most 75 sessions at a time; requests=3000 allows more"
    assert second.startswith("bracket: 8 sessions passes")
    problem = "requests=1500: even 75 sessions at a time meet the objectives, and more need more requests"
    assert ended.complaint == f"{problem}; give requests=3000, or set tighter objectives"


@pytest.mark.long
def test_the_most_concurrent_sessions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is compared as a rate is, on the same sessions."""
    for policy, most in (("orca", 40.0), ("sarathi_serve", 50.0)):
        simulate_curve(monkeypatch, Curve(lambda sessions, most=most: 0.01 * (sessions / most) ** 9, scatter=0.5))  # type: ignore[misc]
        printed = run(
            "workload=chat", "workload.sessions=16", f"output={policy}", f"policy={policy}", without=["requests"]
        )
        figures = json.loads(Path(policy, "capacity.json").read_text())["capacity"]
        assert figures["sessions"] == pytest.approx(most, rel=0.01) and "requests_per_second" not in figures
        assert f"{figures['sessions']:.4g} [{figures['low']:.4g}, {figures['high']:.4g}] sessions (±" in printed
    [pair] = pairs_of(read_replications([Path("orca"), Path("sarathi_serve")]))
    assert pair.results["capacity.sessions"].ratio[0] == pytest.approx(50 / 40, rel=0.02)


def test_the_number_of_requests_of_recorded_sessions_is_given(folder: Path) -> None:
    call = {"t": 0.0, "type": "n", "in": 40, "out": 3, "hash_ids": [1]}
    trace = {"id": "a", "tool_tokens": 1, "system_tokens": 1, "block_size": 64, "requests": [call]}
    Path("agents.jsonl").write_text(json.dumps(trace) + "\n")
    printed = run("workload=agents", f"workload.path={folder / 'agents.jsonl'}")
    assert "requests=3000: recorded sessions are whole; give workload.num_sessions=" in printed
