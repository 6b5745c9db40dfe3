"""A profile from recordings: the prices of iterations, found again from what they took."""

from pathlib import Path

import pytest
from commands import command

from cbatch import BatchShape
from cbatch.sim import ProfileCost, load_profile
from experiments.setup.presets import load_spec
from reproduction.profiles.__main__ import main
from reproduction.profiles.vllm_recordings import stretches

RUN = (
    "policy=vllm_v1 chunk=512 batch=64 backend=sim hardware=h200-vllm workload=open_loop workload.num_requests=200 "
    "workload.arrivals.rate=15 tables=false decisions=true output=recorded"
)


@pytest.mark.long
def test_the_prices_of_a_simulated_engine_are_found_again(tmp_path: Path) -> None:
    done = command("run", *RUN.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    spec = load_spec("llama-3.1-8b")
    engine = ProfileCost(load_profile("h200-vllm"), spec)
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


def test_too_few_recordings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=llama-3.1-8b", f"recordings={tmp_path}", "output=x.json"]) == 2
    assert f"recordings={tmp_path}: 0 iterations of decodes alone and 0 with prompts" in capsys.readouterr().err
