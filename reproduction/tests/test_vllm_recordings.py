"""A profile from recordings: the prices of iterations, found again from what they took."""

from math import ceil
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import command

from cbatch import BatchShape
from cbatch.sim import HostTime, ProfileCost, SimExecutor, load_profile
from experiments.setup.presets import load_spec
from reproduction.profiles import vllm_recordings
from reproduction.profiles.__main__ import main
from reproduction.profiles.vllm_recordings import stretches

RUN = (
    "policy=vllm_v1 chunk=512 batch=64 backend=sim hardware=h100-vllm workload=open_loop workload.num_requests=200 "
    "workload.arrivals.rate=15 tables=false decisions=true output=recorded"
)


@pytest.mark.long
def test_the_prices_of_a_simulated_engine_are_found_again(tmp_path: Path) -> None:
    done = command("run", *RUN.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    spec = load_spec("llama-3.1-8b")
    engine = ProfileCost(load_profile("h100-vllm"), spec)
    measured = list(stretches(tmp_path / "recorded" / "decisions.jsonl.gz"))
    shapes = [shape for stretch in measured for shape in stretch.shapes]
    predicted = [sum(map(engine.predict, stretch.shapes)) for stretch in measured]
    assert [stretch.seconds for stretch in measured] == pytest.approx(predicted)
    recordings, output = f"recordings={tmp_path / 'recorded'}", f"output={tmp_path / 'mine.json'}"
    assert main(["model=llama-3.1-8b", recordings, output]) == 0
    cost = ProfileCost(load_profile(str(tmp_path / "mine.json")), spec)
    more = [BatchShape((), 1, 800), BatchShape(((300, 0),)), BatchShape(((200, 500), (100, 0)), 20, 10000)]
    for shape in (*shapes, *more):
        assert cost.predict(shape) == pytest.approx(engine.predict(shape), rel=0.01), shape
    assert cost.profile.host_time(True, spec).seconds == 0


def test_the_way_to_the_scheduler_is_found_from_when_requests_were_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans every 10 ms; requests that need 4 ms to the scheduler are received at the next plan, or, two in five, at the one after."""
    steps = [SimpleNamespace(record=SimpleNamespace(planned_at=0.01 * n, ended=0.01 * n + 0.0101)) for n in range(1500)]
    came = [0.0137 * n for n in range(1, 1001)]
    received = [0.01 * ceil((time + 0.004) / 0.01) for time in came]
    requests = [
        SimpleNamespace(arrival_time=late, extra={"waited": late - time})
        for time, late in zip(came, received, strict=True)
    ]
    burst = SimpleNamespace(arrival_time=received[-1] + 5, extra={"waited": received[-1] + 5 - came[-1] - 0.001})
    file = SimpleNamespace(recorded=SimpleNamespace(events=steps), requests=[*requests, burst])
    monkeypatch.setattr(vllm_recordings, "read_decisions", lambda path: [file])
    late = vllm_recordings.delays(Path())
    assert len(late) == 1000 and sum(late) / 1000 == pytest.approx(0.004, rel=0.01)


def test_a_server_of_the_profile_delays_requests_beside_that_of_the_run() -> None:
    cost = ProfileCost(load_profile("h200-vllm"), load_spec("llama-3.1-8b"))
    assert SimExecutor(cost, HostTime(0.0, server_seconds=0.25), server_seconds=0.5).server_seconds == 0.75


def test_too_few_recordings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=llama-3.1-8b", f"recordings={tmp_path}", "output=x.json"]) == 2
    assert f"recordings={tmp_path}: 0 iterations of decodes alone and 0 with prompts" in capsys.readouterr().err
