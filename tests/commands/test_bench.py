"""`experiments.bench` writes figures of policies, with real tokens on a CPU or in simulation."""

import json
from pathlib import Path

import pytest

from experiments.bench import main


@pytest.mark.long
def test_policies_are_served_in_turn_on_one_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = "settings=backend=cpu model=tiny batch=4 workload.length=64 workload.num_requests=6"
    policies = "policies=policy=orca;policy=sarathi chunk=16"
    assert main([settings, policies, "repeats=3", f"folder={tmp_path}"]) == 0, capsys.readouterr().err
    stored = json.loads((tmp_path / "cpu" / "serve.json").read_text())
    assert (stored["model"], stored["batch"], stored["requests"]) == ("tiny", 4, 6)
    assert list(stored["figures"]) == ["policy=orca", "policy=sarathi chunk=16"]
    orca, sarathi = stored["figures"].values()
    assert sarathi["iterations"] > orca["iterations"] > 0
    for figures in (orca, sarathi):
        assert figures["eager"] is None, "a CPU has no graphs: all its iterations are without one"
        assert figures["tokens_per_second"]["repeats"] == 3
        assert figures["tokens_per_second"]["median"] == pytest.approx(6 * 64 / figures["seconds"]["median"])
    assert "policy=sarathi chunk=16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("policies=policy=orka", "orka"),
        ("settings=backend=sim backend.replicas=2", "times the iterations of one engine"),
        ("settings=backend=sim backend.pools={a:{batch:4}}", "leave out backend.replicas= and backend.pools="),
    ],
)
def test_what_cannot_be_measured_is_refused(argument: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error
