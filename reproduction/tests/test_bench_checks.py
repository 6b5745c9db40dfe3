"""The benchmark of checked mode measures what it says, on a CPU."""

import json
from pathlib import Path

import pytest

from reproduction.bench.__main__ import main


def test_checked_and_unchecked_runs_are_compared(tmp_path: Path) -> None:
    options = ["backend=cpu", "batch=2", "prompt=4", "turns=2", f"folder={tmp_path}"]
    assert main(["checks", *options]) == 0
    found = json.loads((tmp_path / "cpu" / "checks.json").read_text())["figures"]["batch 2"]
    for kind in ("wall", "processor"):
        assert {name: values["repeats"] for name, values in found[kind].items()} == dict.fromkeys(found[kind], 2)
        assert found[kind]["races over off"]["of all"] == pytest.approx(  # of two turns the median is the mean
            found[kind]["races"]["median"] / found[kind]["off"]["median"]
        )


def test_an_unknown_place_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checks", "backend=sim"]) == 2
    assert capsys.readouterr().err == "error: checks: backend=sim: give auto, cpu or cuda\n"
