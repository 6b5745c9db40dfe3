"""The schedule of a run - what each request does in each iteration - and its chart, of golden schedules."""

from pathlib import Path

import pytest
from hand_made import write_run
from schedules import make_engine
from unit_machine import AMPLE, asked

from cbatch import ConfigError, Engine, Limits, Request
from cbatch.errors import ReplayError
from cbatch.replay.decisions import Decision, StepEnd, record_decisions
from experiments.plots import schedule
from experiments.plots.schedule import Cell, Doing, Schedule, num_iterations, schedule_of
from experiments.store.decisions_file import write_decisions
from policies.chunking import Fixed
from policies.mlfq import MLFQ
from policies.sarathi_serve import SarathiServe
from policies.vllm_v1 import VllmV1


def run(engine: Engine, requests: list[Request]) -> Schedule:
    events = list[Decision | StepEnd]()
    engine.submit(requests)
    with record_decisions(engine, events.append):
        engine.run()
    return schedule_of(events, requests)


PREEMPTED = "A 2/4 @0, B 6/2 @0, C 2/3 @0"  # with 4 tokens in an iteration and 10 of KV cache


def preempting() -> tuple[Engine, list[Request]]:
    return make_engine(VllmV1(4), Limits(8, 4, AMPLE, tile=1), num_blocks=10, block_size=1), list(
        asked(PREEMPTED).values()
    )


def doing(found: Schedule) -> list[str]:
    """A letter for each iteration: prefill, decode, Waiting, paused as ".", preempted as "x"; a space if not there."""
    letters = {Doing.PREFILL: "p", Doing.DECODE: "d", Doing.WAITING: "w", Doing.PAUSED: ".", Doing.PREEMPTED: "x"}
    span = range(num_iterations(found))
    return ["".join(letters[row[at].doing] if at in row else " " for at in span).rstrip() for row in found.values()]


def tokens(found: Schedule) -> list[list[int]]:
    return [[cell.tokens for cell in row.values() if cell.tokens] for row in found.values()]


def test_what_each_request_does_in_each_iteration() -> None:
    """B is recomputed with the token that it had: 4 + 3 tokens; C, whose prompt of 2 is cut by the budget, waits until then."""
    found = run(*preempting())
    assert doing(found) == ["pddd", "pppxpp", "wwwwwppdd"]
    assert tokens(found) == [[2, 1, 1, 1], [2, 3, 1, 4, 3], [1, 1, 1, 1]]
    assert found[1][5] == Cell(Doing.PREFILL, 3)


def test_a_request_that_is_left_out_pauses() -> None:
    requests = list(asked("A 1/4 @0, B 1/2 @1").values())
    found = run(make_engine(MLFQ(quantum=1), Limits(1, 8, AMPLE, tile=1, max_running=4), block_size=1), requests)
    assert doing(found) == ["pd..dd", " wpd"]


def test_iterations_in_flight_leave_no_gaps() -> None:
    """The last token of a request is in flight when the next iteration is planned; that is neither a pause nor a wait."""
    requests = list(asked("A 3/3 @0, B 2/4 @0").values())
    engine = make_engine(SarathiServe(Fixed(4)), Limits(4, 8, AMPLE, tile=1), asynchronous=True)
    found = run(engine, requests)
    assert doing(found) == ["pdd", "ppddd"]


def with_decisions(folder: Path) -> Path:
    run_folder = write_run(folder)
    engine, requests = preempting()
    engine.submit(requests)
    with write_decisions(run_folder / "decisions.jsonl.gz", [engine], []):
        engine.run()
    return run_folder


def test_the_chart_of_a_run_is_drawn_from_its_decisions(tmp_path: Path) -> None:
    folder = with_decisions(tmp_path / "run")
    figure = schedule.draw(folder)
    [panel] = figure.axes
    assert (panel.get_xlabel(), panel.get_xlim()) == ("iteration", (-0.5, 8.5))
    [part] = schedule.draw(folder, first=4, iterations=2).axes
    assert part.get_xlim() == (3.5, 5.5) and all(tick == int(tick) for tick in part.get_xticks())
    [title] = [legend.get_title().get_text() for legend in figure.legends]
    assert title.startswith("prefill_first: llama-13b") and "iterations" not in title
    [title] = [legend.get_title().get_text() for legend in schedule.draw(folder, first=3, iterations=3).legends]
    assert title.endswith("(iterations 3 to 5 of 9)")


def test_the_chart_begins_with_the_second_request(tmp_path: Path) -> None:
    """A has a prompt of 1 and 5 decodes, B arrives with iteration 3; by first=0 the chart begins with the run."""
    folder = write_run(tmp_path / "run")
    engine = make_engine(SarathiServe(Fixed(4)), Limits(4, 8, AMPLE, tile=1), block_size=1)
    engine.submit([*asked("A 1/6 @0, B 2/2 @3").values()])
    with write_decisions(folder / "decisions.jsonl.gz", [engine], []):
        engine.run()
    assert [schedule.draw(folder, first=first).axes[0].get_xlim() for first in (None, 0)] == [(2.5, 5.5), (-0.5, 5.5)]


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_decisions(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"first=9 iterations=32: the run has 9 iterations; choose among them"):
        schedule.draw(folder, first=9)
    monkeypatch.setattr(schedule, "_MOST_REQUESTS", 2)
    with pytest.raises(ConfigError, match=r"first=0 iterations=32: 3 requests, 2 can be shown; give a part with fewer"):
        schedule.draw(folder)
    with pytest.raises(ReplayError, match=r"record a run's decisions with decisions=true"):
        schedule.draw(write_run(tmp_path / "other", speed=1))
    with pytest.raises(ConfigError, match=r"this plot shows at most 1 run, the folder holds 2"):
        schedule.draw(tmp_path)
