"""The page of measured speed: a row for each stored figure, ours and other engines' by hand and by command."""

import json
from pathlib import Path
from typing import Any

from places import RESULTS, ROOT

from reproduction.bench.page import BEGIN, END, comparison, text

STAMP = {
    "command": "measure it",
    "hardware": "NVIDIA H200",
    "date": "2026-02-02",
    "commit": "0123456789abcdef",
    "versions": {"torch": "1"},
}


def write(path: Path, **figures: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**STAMP, **figures}))


def cells(page: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def test_each_stored_figure_has_a_row(tmp_path: Path) -> None:
    by_hand = {
        "2048 new": {"bytes_bound": 3.0, "engines": {"vLLM 1, sync": 6.0}, "active_share": {"vLLM 1, sync": 0.5}}
    }
    (tmp_path / "peers.json").write_text(json.dumps({"date": "2026-01-01", "decode": by_hand}))
    again = {"median": 5.0, "min": 4.0, "max": 6.0, "repeats": 3}
    write(
        tmp_path / "peers" / "vllm.json", section=["decode", "2048 new"], row="vLLM 1, async", figures={"value": again}
    )
    ours = {"ms_per_iteration": {"median": 4.0}, "active_share": {"median": 0.9}, "kernel_share": 0.8}
    write(tmp_path / "async-2048.json", figures={"2048 new": {"async": ours, "sync_over_async": 1.1}})
    policies = {"orca": {"tokens_per_second": {"median": 1234.0}}}
    write(tmp_path / "trace-256.json", batch=256, figures=policies)
    page = text(tmp_path)
    found = cells(page)
    day = "2026-02-02, 0123456789ab"
    assert found["2048 new, vLLM 1, sync"] == ["2026-01-01, by hand", "6.00", "", "50.0%", "50.00%", ""]
    assert found["2048 new, vLLM 1, async"] == [day, "5.00", "4.00 to 6.00", "60.0%", "", ""]
    assert found["**cbatch, 2048 new, async**"] == [day, "4.00", "", "75.0%", "90.00%", "80.0%"]
    assert found["**cbatch, batch 256, orca**"] == [day, "1,234", ""]
    assert "* `measure it`; NVIDIA H200; 2026-02-02, 0123456789ab; torch 1" in page


def test_pages_are_those_of_the_stored_results() -> None:
    assert (RESULTS / "h200" / "README.md").read_text() == text(RESULTS / "h200")
    assert f"{BEGIN}\n{comparison(RESULTS / 'h200')}\n{END}" in (ROOT / "README.md").read_text()
