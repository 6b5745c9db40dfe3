"""The page of measured figures, from files as the benchmarks write them."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.profile.kernel_trace import covered_share
from reproduction.bench import measured, performance, summary, tables
from reproduction.bench.__main__ import main
from reproduction.bench.tables import Row

STAMP = {"hardware": "NVIDIA H200", "date": "2026-01-02", "versions": {"torch": "2.11.0"}}
PEERS = {
    "date": "2026-01-01",
    "setting": "greedy",
    "note": "Theirs.",
    "copy_bandwidth": "4 TB/s",
    "decode": {
        "8 new": {
            "bytes_bound": 4.0,
            "engines": {"other": 6.0},
            "seconds": {},
            "active_share": {},
            "compared_with": "other",
        }
    },
    "one_request": {"bytes_bound": 400, "engines": {"other": 200}, "compared_with": "other"},
}


def write(folder: Path, name: str, figures: dict[str, Any], date: str = "2026-01-02", **stamp: str) -> None:
    stamp = {**STAMP, "date": date, "command": f"bench {name}", **stamp}
    (folder / f"{name}.json").write_text(json.dumps({**stamp, **figures}))


def loop(milliseconds: float, gap: float) -> dict[str, Any]:
    """Figures of a loop whose iterations compute for 5 ms and lie `gap` apart."""
    starts = [index * (5 + gap) for index in range(6)]
    steps = [
        {
            "planned_at": start - gap,
            "launched_at": start,
            "waited_at": start,
            "received_at": start + 5,
            "done_at": start + 5,
            "started": start,
            "ended": start + 5,
        }
        for start in starts
    ]
    values = {"seconds": 1.5, "ms_per_iteration": milliseconds, "active_share": 0.9998, "host_ms_per_iteration": 0.3}
    return {**{name: {"median": value} for name, value in values.items()}, "lanes": steps}


def batches(**loops: dict[str, Any]) -> dict[str, Any]:
    return {"model": "small", "batch": 2, "prompt": 4, "figures": {"8 new": loops}}


def rows(page: str) -> dict[str, list[str]]:
    """Cells of all tables' rows by their first."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if "|" in line]
    return {line[0]: line[1:] for line in lines}


def test_figures_stand_beside_the_peers(tmp_path: Path) -> None:
    (tmp_path / "peers.json").write_text(json.dumps(PEERS))
    write(tmp_path, "async", batches(sync=loop(6.0, 1.0), async_=loop(5.0, 0.0)))
    figures = {
        "fused": {
            "output_tokens_per_second": {"median": 250.0},
            "build_seconds": 3.0,
            "capture_seconds": 2.0,
            "graphs": 4,
        }
    }
    write(tmp_path, "graphs", {"figures": figures})
    page = performance.text(measured.read(tmp_path))
    when = "2026-01-02, commit not recorded"
    assert rows(page)["**cbatch, sync**"] == ["6.00", "1.000", "66.7%", "99.98%", when]
    assert rows(page)["**cbatch, fused**"] == ["250", "1.250", "62.5%", when]
    assert rows(page)["other"][-1] == "2026-01-01, by hand"
    assert rows(page)["fused"] == ["3.00", "2.00", "not measured", "4", when]
    assert "`bench graphs`; NVIDIA H200; 2026-01-02, commit not recorded; torch 2.11.0" in page


def test_throughput_at_every_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One policy was measured at both; the command says what it has written."""
    speeds = {"2": {"orca": 1000.0}, "14": {"orca": 2000.0, "sarathi, 256 tokens": 3000.0}}
    figures = {
        ratio: {name: {"tokens_per_second": {"median": speed}} for name, speed in of_ratio.items()}
        for ratio, of_ratio in speeds.items()
    }
    write(tmp_path, "pd", {"figures": figures})
    assert main(["report", f"results={tmp_path}", f"docs={tmp_path / 'docs'}"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'docs' / 'performance.md'}\n"
    page = rows((tmp_path / "docs" / "performance.md").read_text())
    assert page["tokens/s at P:D"] == ["2", "14"] and page["orca"] == ["1,000", "2,000"]
    assert page["sarathi, 256 tokens"] == ["not measured", "3,000"]


def test_when_a_row_was_measured_is_said_where_one_of_them_knows() -> None:
    unknown, known = Row("a", {"median": 2.0}), Row("b", {"median": 4.0, "measured": "2026-01-02"})
    assert "measured" not in tables.speeds([unknown], [], "ms", at_copy_speed=None, faster_is_less=True)
    table = tables.speeds([unknown], [known, Row("c", None)], "ms", at_copy_speed=None, faster_is_less=True)
    page = rows(table)
    assert page[""] == ["ms", "speed over a", "measured"]
    assert page["a"] == ["2.00", "1.000", ""] and page["b"] == ["4.00", "0.500", "2026-01-02"]
    assert page["c"][0] == "not measured" and page["c"][-1] == ""


@pytest.mark.parametrize(
    ("name", "figures", "said"),
    [
        ("vLLM, batch 64, 8,192 tokens per iteration", {}, " (32; 8,192)"),
        ("vLLM", {"batch": 64, "budget": 2048}, " (64; 2,048)"),
        ("vLLM", {}, " (unknown)"),
    ],
)
def test_batch_and_budget_stand_in_a_rows_figures_or_in_its_name(name: str, figures: Any, said: str) -> None:
    assert summary._setting(Row(name, figures), 32, " (unknown)") == said


def test_what_is_missing_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "peers.json").write_text(json.dumps(PEERS))
    page = performance.text(measured.read(tmp_path))
    assert rows(page)["**cbatch, async**"][0] == "not measured"
    assert page.count("cbatch: not measured.") == 4


def test_attention_of_each_model_stands_beside_a_copy_of_as_many_bytes(tmp_path: Path) -> None:
    (tmp_path / "peers.json").write_text(json.dumps(PEERS))
    alone = {"time": {"median": 12.6}, "chunks_alone": None, "bytes_bound": 4.9}
    fast = {"time": {"median": 10.0}, "chunks_alone": None, "bytes_bound": 10.6}
    mixed = {"time": {"median": 36.9}, "chunks_alone": {"median": 14.3}, "bytes_bound": 14.7}
    figures = {"one decode": alone, "three beside a chunk": mixed, "many": fast}
    write(tmp_path, "attention-small", {"model": "small", "batch": 2, "figures": figures})
    page = performance.text(measured.read(tmp_path))
    assert "### small, beside a chunk in graphs for 2 requests" in page
    assert rows(page)["one decode"] == ["12.6", "4.9", ""]
    assert rows(page)["three beside a chunk"] == ["36.9", "14.7", "22.6"]
    assert (
        "not a bound: kernels that only read can be faster than a copy, by 6% in the fastest attention below." in page
    )


def test_loops_measured_apart_stand_beside_those_measured_together(tmp_path: Path) -> None:
    write(tmp_path, "async-more", batches(**{"async": loop(7.0, 0.0), "sync": loop(8.0, 0.0)}), "2026-01-01")
    commit = "0123456789abcdef + changes"
    write(tmp_path, "async", batches(**{"async": loop(5.0, 0.0)}), "2026-01-03", commit=commit)
    page = performance.text(measured.read(tmp_path))
    assert rows(page)["**cbatch, async**"][0] == "5.00"
    assert rows(page)["**cbatch, sync, earlier**"][0] == "8.00"
    assert rows(page)["**cbatch, async, earlier**"][0] == "7.00"
    assert "**cbatch, sync**" not in rows(page)
    assert rows(page)["**cbatch, async**"][-1] == "2026-01-03, 0123456789ab + changes"
    for name in ("sync", "async"):
        assert rows(page)[f"**cbatch, {name}, earlier**"][-1] == "2026-01-01, commit not recorded"
    write(tmp_path, "async", batches(**{"async": loop(5.0, 0.0), "sync": loop(6.0, 0.0)}), "2026-01-03")
    assert rows(performance.text(measured.read(tmp_path)))["**cbatch, sync**"][0] == "6.00"


def test_numbers_stand_below_their_heads() -> None:
    lines = tables.markdown([["a", "1"], ["long name", "1,234"]], ["", "ms"])
    assert [line.split("|")[1:3] for line in lines.splitlines()[2:]] == [
        [" a         ", "     1 "],
        [" long name ", " 1,234 "],
    ]


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", f"results={tmp_path}", f"docs={tmp_path / 'docs'}"]) == 2
    assert "no results there; run a benchmark first" in capsys.readouterr().err
    write(tmp_path, "async", batches(**{"async": loop(5.0, 0.0)}))
    assert main(["report", f"results={tmp_path}", f"docs={tmp_path / 'docs'}"]) == 0
    assert {path.name for path in (tmp_path / "docs").iterdir()} == {"performance.md"}
    assert main(["report", "folder=x"]) == 2
    assert "report: folder: no such key" in capsys.readouterr().err


def test_the_profilers_window_begins_with_the_first_kernel() -> None:
    """What was in flight when the profiler started left only the next iteration's copy behind."""
    events = [
        (0.0, 1.0, "Memcpy HtoD (Pinned -> Device)"),
        (100.0, 140.0, "product"),
        (130.0, 150.0, "norm"),
        (160.0, 170.0, "Memcpy DtoH (Device -> Pinned)"),
        (165.0, 200.0, "product"),
    ]
    assert covered_share(events) == pytest.approx(0.9)
