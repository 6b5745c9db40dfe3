"""Bubbles of a real pipeline: measured times are accounted for as the simulator accounts for its own."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_cluster import make_cost, make_engine

from cbatch import BatchShape, Policy, Request
from cbatch.executor import StepResult
from cbatch.model.topology import Topology
from cbatch.record import RunRecord, StepRecord
from cbatch.results.stages import account_stages
from cbatch.sim.executor import SimExecutor
from cbatch.sim.measured import HostTime
from cbatch.sim.stages import Stages
from experiments.run import main
from policies.orca import Orca
from policies.prefill_first import PrefillFirst


class Watched(Stages):
    """Keeps when each stage computed each iteration."""

    def __init__(self, num_stages: int) -> None:
        super().__init__(num_stages)
        self.spans: list[tuple[tuple[float, float], ...]] = []

    def launch(self, now: float, shape: Any, times: Any, **others: Any) -> Any:
        span = super().launch(now, shape, times, **others)
        last = len(self._free_at) - 1
        busy = [
            times.compute + times.embedding * (not stage) + times.head * (stage == last) for stage in range(last + 1)
        ]
        self.spans.append(tuple((end - work, end) for end, work in zip(self._free_at, busy, strict=True)))
        return span


class Reporting(SimExecutor):
    """A simulated pipeline that reports the times of its stages, as one of real tokens does."""

    def restart(self) -> None:
        super().restart()
        self._stages = self.watched = Watched(self.num_stages)
        self._num_waited = 0

    def wait(self, in_flight: Any) -> StepResult:
        self._num_waited += 1
        return super().wait(in_flight)._replace(stages=self.watched.spans[self._num_waited - 1])


@pytest.mark.parametrize("host_seconds", [0.0, 2e-4])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("policy", "num_stages"), [(Orca, 2), (PrefillFirst, 4)])
def test_a_simulated_run_measured_from_outside_has_the_simulators_accounts(
    policy: Callable[[], Policy], num_stages: int, asynchronous: bool, host_seconds: float
) -> None:
    """Forty requests fill the pipeline, drain it, and fill it again. Whole prompts: the simulator counts one token as a decode."""
    executor = Reporting(make_cost(Topology(1, num_stages)), HostTime(host_seconds))
    engine = make_engine(policy(), executor, asynchronous=asynchronous)
    engine.submit(Request(id_, 2 + 7 * id_ % 40, 3 + id_ % 9, arrival_time=0.1 * (id_ // 32)) for id_ in range(40))
    record = engine.run()
    expected, found = executor.accounts(), account_stages(record)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.span == pytest.approx(theirs.span)
        for name in ("compute", "communication", "pb1", "pb2", "pb3", "host", "no_work"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=1e-6, abs=1e-9), name
    assert sum(account.bubbles for account in found) > 0


def step(number: int, planned: float, launched: float, waited: float, received: float, prefill: int) -> StepRecord:
    times = (planned, launched, waited, received, received, 0.0, 0.0)
    return StepRecord(number, *times, 1, prefill, 4, 0, 0, 0, 0, 0, 0, "")


def test_a_bubble_by_hand() -> None:
    """A prompt takes 4 s in each of two stages, decodes 1 s; a hand-over 0.5 s, planning 0.25 s.

    The second stage has no work before 4.75, then computes the prompt to 8.75 and the decodes to 9.75. The first stage
    ends the decodes at 5.25 and waits for the prompt's token until 8.75 (pb2), then for its way back.
    """
    record = RunRecord()
    record.steps += [
        step(0, 0.0, 0.25, 0.5, 8.75, 100),
        step(1, 0.25, 0.5, 8.75, 9.75, 0),
        step(2, 0.5, 0.75, 9.75, 11.0, 0),
    ]
    record.stages += [((0.25, 4.25), (4.75, 8.75)), ((4.25, 5.25), (8.75, 9.75)), ((9.25, 10.25), (10.75, 11.75))]
    first, second = account_stages(record)
    assert (first.compute, first.host, first.pb2, first.communication) == (6.0, 0.25, 3.5, 0.5)
    assert (second.compute, second.pb3, second.host) == (6.0, 0.5, 0.25)
    assert first.span == second.span == 11.75


@pytest.mark.long
def test_a_run_writes_times_accounts_and_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    work = ("backend=cpu", "policy=orca", "workload.num_requests=3", "workload.length=16", "batch=2", "output=out")
    assert main([*work, "backend.pipeline_stages=2"]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    with (tmp_path / "out" / "stages.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == summary["run"]["iterations"]
    for row in rows:
        times = [float(row[name]) for name in ("started_0", "ended_0", "started_1", "ended_1")]
        assert times == sorted(times)
    stages = summary["about"]["execution"]["stages"]
    assert min(value for stage in stages for value in stage.values()) >= 0
    computed = [sum(float(row[f"ended_{stage}"]) - float(row[f"started_{stage}"]) for row in rows) for stage in (0, 1)]
    assert [stage["compute"] for stage in stages] == pytest.approx(computed, rel=1e-3)
    events = json.loads(gzip.decompress((tmp_path / "out" / "timeline.json.gz").read_bytes()))["traceEvents"]
    lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert lanes == ["stage 0", "stage 1"]
    compute = [(event["tid"], event["name"]) for event in events if event["name"].startswith("compute")]
    assert compute == [(stage, f"compute {number}") for number in range(len(rows)) for stage in (0, 1)]


def test_what_stages_did_is_forgotten_once_it_is_accounted_for() -> None:
    """Else the memory of a long run would grow with its iterations."""
    stages = Stages(2)
    for begin in (0.0, 2.0):
        spans = (begin, begin + 1), (begin + 1, begin + 2)
        stages.record(begin, BatchShape((), 1, 0), spans, full=True, carried_from=None)
    assert stages._trail == []
