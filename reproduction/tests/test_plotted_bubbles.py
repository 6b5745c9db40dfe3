"""The picture of idle stages: what each bar stacks, of benchmark results and of runs."""

import json
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pandas as pd
import pytest
from matplotlib.axes import Axes
from places import RESULTS

from cbatch import ConfigError
from reproduction.validation import bubbles
from reproduction.validation.__main__ import main


def stage(**shares: float) -> dict[str, float]:
    idle = dict.fromkeys(("pb1", "pb2", "pb3", "communication", "host", "no_work"), 0.0) | shares
    return {"compute": 1 - sum(idle.values()), **idle}


def write(folder: Path, name: str, figures: dict[str, Any]) -> None:
    stamped = {"model": "llama-13b", "batch": 16, "hardware": "NVIDIA H200 x2", "date": "2026-11-22"}
    (folder / f"{name}.json").write_text(json.dumps({**stamped, "figures": figures}))


def heights(axes: Axes) -> dict[str, list[float]]:
    """Of each part's bars, from the left."""
    return {bars.get_label(): [round(bar.get_height(), 6) for bar in bars] for bars in axes.containers}  # type: ignore[union-attr]


def test_measured_stands_beside_simulated(tmp_path: Path) -> None:
    """Shares are means over both stages; policies and numbers of stages that were not simulated are left out."""
    real = [stage(pb1=0.1, pb2=0.2, no_work=0.1), stage(pb2=0.1, pb3=0.1, host=0.05, communication=0.15)]
    one = {"orca": {"stages": []}}
    write(tmp_path, "pipeline", {"orca": {"stages": real}, "sarathi, 256 tokens": {"stages": real}, "1": one})
    write(tmp_path, "pipeline-simulated", {"2": {"orca": {"stages": [stage(pb2=0.3), stage(pb2=0.1)]}}, "1": one})
    write(tmp_path, "pipeline-split", {"2": {"orca": {"stages": real}}})
    figure = bubbles.draw(tmp_path)
    [axes] = figure.axes
    assert list(heights(axes).values()) == [[0.05, 0], [0.15, 0.2], [0.05, 0], [0.05, 0], [0.1, 0]]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["measured", "simulated"]
    assert [text.get_text() for text in axes.texts] == ["PB 25.0%", "PB 20.0%", "orca"]
    assert axes.get_title(loc="left") == "llama-13b, 2 stages, batches of 16"
    assert "measured on NVIDIA H200 x2, 2026-11-22" in figure.get_supxlabel()


def test_runs_have_a_bar_for_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"about": {}, "model": "llama-13b", "workload": "zipf"}
    rows = [
        {"label": "orca", "execution.stages": [stage(pb2=0.3), stage(pb3=0.2)], **shared},
        {"label": "orca, one GPU", "execution.stages": [stage()], **shared},
        {"label": "orca, one real GPU", **shared},
    ]
    monkeypatch.setattr(bubbles, "load_runs", lambda folder, runs: pd.DataFrame(rows))
    monkeypatch.setattr(bubbles, "add_title", lambda *arguments, **options: None)
    [axes] = bubbles.draw(tmp_path).axes
    assert list(heights(axes).values())[1:3] == [[0.3, 0], [0, 0.2]]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["stage 0", "stage 1"]
    del rows[0]
    with pytest.raises(
        ConfigError, match=r"^bubbles: no run has several pipeline stages; give backend.pipeline_stages=2"
    ):
        bubbles.draw(tmp_path)


def test_the_command_draws_what_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copytree(RESULTS / "h200-x2", tmp_path / "pipelines", ignore=ignore_patterns("plots"))
    assert main(["bubbles", str(tmp_path / "pipelines")]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.suffix for path in written] == [".pdf", ".png"]
    assert all(path.stat().st_size > 500 for path in written)
