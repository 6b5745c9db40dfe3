"""The examples run as they stand, each in an empty folder, and stay short."""

import runpy
from pathlib import Path

import pytest
from commands import ROOT, as_in_a_new_process

LEAVES: dict[str, list[str]] = {"own_policy": [], "own_router": [], "sweep_and_plot": ["latency.png"]}
"""The files that each example writes."""


def test_examples_have_at_most_40_lines() -> None:
    sizes = {path.stem: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert sizes.keys() == LEAVES.keys() and max(sizes.values()) <= 40, sizes


@pytest.mark.long
@pytest.mark.parametrize("name", LEAVES)
def test_an_example_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints figures of each policy that it names, and writes its files."""
    path = ROOT / "examples" / f"{name}.py"
    with as_in_a_new_process(tmp_path, [str(path)]):
        runpy.run_path(str(path), run_name="__main__")
    assert "sarathi_serve" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == LEAVES[name]
