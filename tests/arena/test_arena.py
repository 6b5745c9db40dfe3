"""The leaderboard: a cell against single runs, its pages by hand."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import summary
from in_process import outcome

from cbatch import ConfigError
from experiments.arena import __main__ as command
from experiments.arena import cell as one_cell
from experiments.arena import web
from experiments.arena.cell import CELL
from experiments.arena.markdown import capacities, page, ranking
from experiments.arena.rows import read_board
from experiments.capacity.folder import CAPACITY
from experiments.run import main as run
from experiments.store.intervals import Mean

# -- a cell -----------------------------------------------------------------------------------------------------------

OPEN = [
    "model=tiny",
    "workload=open_loop",
    "policy=orca",
    "batch=4",
    "kv_tokens=4000",
    "max_tokens=2048",
    "max_running=auto",
]
ARENA = [*OPEN, "slo.ttft=0.004", "slo=none", "load=0.7", "replications=2", "requests=40", "predictor=none"]


def arena(*arguments: str) -> str:
    """What the command prints, or its errors."""

    def main() -> int:
        return command.arena(sys.argv[1:])

    ended = outcome(main, list(arguments))
    return ended.complaint or ended.printed


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with chdir(tmp_path):
        yield tmp_path


def cells() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(Path("multirun").rglob(CELL.name))]


def test_a_cell_is_what_runs_at_its_rate_measure(folder: Path) -> None:
    """Each replication is the run with that seed at the cell's rate, and the rate is the load times the bound of all requests."""
    printed = arena(*ARENA)
    [cell] = cells()
    for seed in (0, 1):
        rate = f"workload.arrivals.rate={cell['cell']['rate']!r}"
        keys = [
            "backend=sim",
            "bounds=true",
            "timeline=off",
            "progress=off",
            "+workload.slo.ttft=0.004",
            rate,
            f"seed={seed}",
        ]
        own = ["workload.num_requests=40", "workload.max_new_tokens=2048"]
        outcome(run, [*OPEN, *keys, *own, f"output=run{seed}"])
        for key in (
            "attainment.share",
            "ttft_seconds.p50",
            "end_to_end_seconds.mean",
            "throughput.total_tokens_per_second",
        ):
            group, _, name = key.partition(".")
            assert cell["by_replication"][key][seed] == pytest.approx(summary(Path(f"run{seed}"))[group][name]), key
        assert cell["by_replication"]["regret.latency"][seed] >= 1
    assert cell["cell"]["rate"] == pytest.approx(0.7 * cell["cell"]["rate_bound"])
    assert "\n1 cell\n" in printed and "multirun/arena/arena.html" in printed
    assert "finished before" in arena(*ARENA), "it is kept"
    arena(*[key.replace("orca", "request_level") for key in ARENA])
    [other] = [found for found in cells() if found["about"]["policy"] == "request_level"]
    assert other["cell"]["rate"] == cell["cell"]["rate"], "the load does not depend on the policy"
    text = Path("multirun/arena/arena.md").read_text()
    assert "| orca " in text and "| request_level " in text, "the pages show all that the folder holds"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["load=0", "replications=1"], "load=0: "),
        (["capacity=maybe"], "capacity=maybe: give on or off"),
        (["slo=strict", "load=0.4,0.6", "requests=x"], "requests=x: give auto, or a whole number from 20"),
        (["backend=cpu"], "backend=cpu: this command simulates; give backend=sim"),
    ],
)
def test_bad_input_is_one_line_before_the_first_cell(
    given: Sequence[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {key.partition("=")[0] for key in given}
    monkeypatch.setattr(sys, "argv", ["arena"])
    assert command.arena([*[key for key in ARENA if key.partition("=")[0] not in keys], *given]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"error: {said}") and len(lines) == 1
    assert not list(folder.rglob(CELL.name))


@pytest.mark.parametrize(
    ("recorded", "remedy"), [(90, "give requests=30, or fewer replications="), (50, "give fewer replications=")]
)
def test_a_trace_too_short_for_its_replications_is_told_what_would_do(recorded: int, remedy: str, folder: Path) -> None:
    path, rows = folder / "trace.csv", "".join(f"{time},a,3,1\n" for time in range(recorded))
    path.write_text(f"arrival_s,client,prompt_tokens,output_tokens\n{rows}")
    trace = {"_target_": "experiments.workloads.TraceReplay", "path": str(path), "format": "vtc"}
    held = f"a trace of {recorded} requests holds {recorded // 40} replications of this length"
    with pytest.raises(ConfigError, match=f"^requests=40: {held}; {remedy}$"):
        one_cell._num_requests(one_cell.Keys(slo={}, load=0.7, replications=3, requests=40, capacity=False), trace)


def test_without_plotly_it_says_so_before_it_simulates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "find_spec", lambda name: None)
    assert arena(*ARENA).startswith("plotly, which draws the page, is not installed")
    assert not list(folder.iterdir())


def test_without_the_traces_it_says_so_once(folder: Path) -> None:
    assert arena("policy=orca").startswith("traces=traces: no such folder; give the one with the published traces")
    assert not list(folder.iterdir())


# -- the pages --------------------------------------------------------------------------------------------------------

ABOUT = {
    "chunking": None,
    "simulated": True,
    "execution": {"profile": "h200", "error": "unknown", "iterations_outside_measured_range": 0},
    "output_lengths_known": True,
    "overrides": [],
    "date": "2026-01-02T03:04:05",
    "commit": "0123456789abcdef",
    "slo": "strict",
}


def write_cell(policy: str, load: float, shares: Sequence[float], latency: float) -> None:
    about = {**ABOUT, "policy": policy, "workload": "traces/a<b"}
    zeros = ("regret.violations", "ttft_seconds.p50", "ttft_seconds.p99", "tbt_seconds.p99", "run.preemptions")
    values = {key: [0.0] * len(shares) for key in zeros} | {"regret.latency": [latency] * len(shares)}
    content = {
        "about": about,
        "cell": {"load": load, "rate": 10 * load, "requests": 100, "cpu_seconds": 2.0},
        "by_replication": {"attainment.share": list(shares), **values},
        "settings": {"load": load, "policy": {"_target_": policy}, "workload": {}, "replications": 4},
    }
    path = Path("board/cells") / f"{policy}{load}" / CELL.name
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))


def write_capacity(policy: str, slo: str, rate: float) -> None:
    about = {**ABOUT, "policy": policy, "workload": "traces/a<b", "slo": slo}
    settings = {"slo": {"ttft": rate}, "accuracy": rate, "replications": 200}
    found = {"requests_per_second": rate, "low": rate - 1, "high": rate + 2, "cpu_seconds": 5.0}
    content = {"about": about, "capacity": found, "regret": {"capacity": rate / 40}, "settings": settings}
    path = Path("board/capacity") / f"{policy}{slo}" / CAPACITY.name
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))


@pytest.fixture
def board(folder: Path) -> Any:
    """`low` and `high` differ by 2% in each replication, however these scatter; `wide` scatters by itself."""
    scatter = np.array([0.1, -0.1, 0.05, -0.05])
    for load, level in ((0.4, 0.9), (0.8, 0.6)):
        write_cell("high", load, level + scatter, 2.0)
        write_cell("low", load, level - 0.02 + scatter, 4.0)
        write_cell("wide", load, level - 0.03 - 3 * scatter, 3.0)
    write_cell("partial", 0.4, [0.1] * 4, 1.0)
    write_capacity("high", "strict", 10)
    write_capacity("high", "relaxed", 20)
    return read_board(Path("board"))


def test_policies_are_ranked_where_all_have_been_and_told_apart_in_pairs(board: Any) -> None:
    best = {(row.policy, row.load): row.best for row in board.rows}
    assert best == {
        **{(policy, load): policy != "low" for policy in ("high", "low", "wide") for load in (0.4, 0.8)},
        ("partial", 0.4): False,
    }
    assert ranking(board.rows)[1] == [
        ["high", "90.0", "1 of 1", "2.00"],
        ["low", "88.0", "0 of 1", "4.00"],
        ["wide", "87.0", "1 of 1", "3.00"],
        ["partial", "10.0", "0 of 1", "1.00"],
    ]
    assert capacities(board.capacities)[1] == [
        ["a<b", "relaxed", "high", "20 [19, 22]", "50.0"],
        ["a<b", "strict", "high", "10 [9, 12]", "25.0"],
    ]


def test_the_markdown_page_has_a_table_per_trace_and_objectives(board: Any) -> None:
    text = page(board, "Title")
    table = text.partition("## a<b, strict\n\n")[2].partition("\n\n")[0].splitlines()
    assert [cell.strip() for cell in table[0].split("|")[1:-1]] == [
        "policy",
        "attained [%], load 0.4 (4/s)",
        "latency / bound",
        "attained [%], load 0.8 (8/s)",
        "latency / bound",
    ]
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in table[2:]}
    half = 3.182446 * np.std([0.1, -0.1, 0.05, -0.05], ddof=1) / 2 * 100  # Student's t of 3 degrees of freedom
    assert rows["low"] == [f"88 ± {half:.2g}", "4", f"58 ± {half:.2g}", "4"]
    assert rows["high"][0] == f"**90 ± {half:.2g}**"
    assert rows["partial"] == ["10", "1", "-", "-"]
    assert list(rows) == ["high", "low", "wide", "partial"], "by attainment at the highest load"
    assert "9 simulated, 24 s of processor time, 2026-01-02, commit 0123456789ab" in text
    assert "true output lengths known to the policy, as max_new_tokens" in text


def test_the_html_page_is_complete_and_self_contained(board: Any) -> None:
    text = web.page(board, "Title <1>")
    assert text.count("Plotly.newPlot(") == 2 and not re.search(r"<(script|link)[^>]+(src|href)=", text)
    assert "<h1>Title &lt;1&gt;</h1>" in text
    cells = re.findall(r'<td[^>]*data-value="([^"]*)">([^<]*)</td>', text.partition("<h2>Cells</h2>")[2])
    assert ("a&lt;b", "a&lt;b") in cells, "names are escaped"
    [sorts_by] = {value for value, shown in cells if shown.startswith("88 ±")}
    assert float(sorts_by) == pytest.approx(88.0), "columns sort by numbers"
    figure = web.attainment_figure(board.rows)
    lines = {line.name: (list(line.x), list(line.y)) for line in figure.data}
    assert lines["high"] == ([0.4, 0.8], pytest.approx([0.9, 0.6]))
    assert sum(line.showlegend for line in figure.data) == len(lines) == 4
    assert [axis.title.text for axis in figure.select_yaxes(col=1)] == ["attainment"]
    single = web.attainment_figure([row for row in board.rows if row.load == 0.8])
    rows = {line.name: (list(line.x), list(line.y)) for line in single.data}
    assert rows["high"] == ([pytest.approx(0.6)], ["high"]), "of one load: lines would be points above each other"
    for mean, above, below in ((0.98, 0.02, 0.1), (0.5, 0.1, 0.1), (0.03, 0.1, 0.03)):
        row = next(row for row in board.rows if row.policy == "high" and row.load == 0.8)
        figures = {**row.figures, "attainment.share": Mean(mean, 0.1, 5)}
        [drawn] = web.attainment_figure([row._replace(figures=figures)]).data
        assert [*drawn.error_x.array, *drawn.error_x.arrayminus] == pytest.approx([above, below])
    drawn = web.capacity_figure(board.capacities, ["SIMULATED"])
    assert drawn.layout.annotations[-1].text == "SIMULATED"
    points = {one.name: (one.mode, list(one.x), list(one.y), list(one.error_x.array)) for one in drawn.data}
    [policy] = {each.policy for each in board.capacities}
    assert points == {"strict": ("markers", [10], [policy], [2]), "relaxed": ("markers", [20], [policy], [2])}
    assert drawn.layout.xaxis.type is None
    near = board.capacities[0]._replace(rate=0.1, low=0.09, high=0.12)
    assert web.capacity_figure([*board.capacities, near]).layout.xaxis.type == "log", "0.1 would touch the axis"
    other = near._replace(policy="a", slo="strict")
    rows = web.capacity_figure([other._replace(slo="a", rate=30.0), other, *board.capacities]).layout.yaxis
    assert list(rows.categoryarray) == [policy, "a"], "whatever objectives are called, by the highest capacity"
    many = [board.capacities[0]._replace(policy=f"policy {number}") for number in range(16)]
    assert web.capacity_figure(many).layout.height - 40 - 80 > 16 * 28, (
        "between the margins: a longer legend would scroll"
    )


def test_every_policy_of_the_figure_has_a_look_of_its_own_and_coinciding_ones_are_named(board: Any) -> None:
    row = board.rows[0]
    names = [f"policy {number:02}" for number in range(20)]
    alone = row._replace(policy=names[0], figures={**row.figures, "attainment.share": Mean(0.25, 0.1, 5)})
    cells = [alone, *(row._replace(policy=name) for name in names[1:])]
    rows = [cell._replace(load=load) for load in (0.8, 0.4) for cell in cells]
    figure = web.attainment_figure(rows, ["SIMULATED <with> h200"])
    looks = {(line.line.color, line.line.dash, line.marker.symbol) for line in figure.data}
    assert len(looks) == 20 and len({line.line.color for line in figure.data}) == 16
    below = figure.layout.annotations[-1].text.replace("<br>", " ")
    assert below == f"SIMULATED &lt;with&gt; h200 {' and '.join(names[1:])} coincide"
