"""The leaderboard: its runs against runs at a rate, its tables by hand."""

from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from commands import summary
from in_process import outcome

from experiments import arena as command
from experiments.arena import ATTAINED, FIGURES, LATENCY
from experiments.report.headings import flat
from experiments.run import main as run
from experiments.store.run_folder import run_folders
from experiments.store.runs import read_runs

SMALL = ["model=tiny", "workload=open_loop", "batch=4", "kv_tokens=4000", "max_tokens=2048", "max_running=auto"]
ARENA = [*SMALL, *["policy=orca", "slo.ttft=0.004", "workload.load=0.7", "replications=2"]]
ARENA += ["workload.num_requests=20", "predictor=none"]


def arena(*arguments: str) -> str:
    """What the command prints, or its error."""
    ended = outcome(command.arena, list(arguments))
    return ended.complaint or ended.printed


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with chdir(tmp_path):
        yield tmp_path


@pytest.mark.long
def test_a_cell_is_runs_at_its_rate(folder: Path) -> None:
    """Replication k is the run with seed k at the cell's rate: 0.7 of the highest one, the same for all policies.

    Objectives given by their keys take the place of strict and relaxed ones.
    """
    printed = arena(*ARENA)
    cells = sorted(map(summary, run_folders(Path("multirun"))), key=lambda cell: cell["about"]["number"])
    assert [cell["about"]["load"]["load"] for cell in cells] == [0.7, 0.7]
    [rate] = {cell["about"]["load"]["rate"] for cell in cells}
    keys = "policy=orca backend=sim bounds=true timeline=off progress=off +workload.slo.ttft=0.004 workload.num_requests=20"
    for seed, cell in enumerate(cells):
        others = [
            "workload.max_new_tokens=2048",
            f"workload.arrivals.rate={rate!r}",
            f"seed={seed}",
            f"output=run{seed}",
        ]
        outcome(run, [*SMALL, *keys.split(), *others])
        alone = summary(Path(f"run{seed}"))
        for group in ("attainment", "ttft_seconds", "end_to_end_seconds", "throughput"):
            assert dict(flat(cell[group])) == pytest.approx(dict(flat(alone[group]))), group
        assert cell["regret"]["latency"] >= 1
    assert "multirun/arena/arena.md" in printed and "finished before" in arena(*ARENA)
    wrong = outcome(command.arena, [*ARENA, "slo.tbt=fast"])
    assert wrong.complaint and "arena.md" not in wrong.printed, "no page is made"
    arena(*[key.replace("orca", "request_level") for key in ARENA])
    assert {summary(path)["about"]["load"]["rate"] for path in run_folders(Path("multirun"))} == {rate}
    text = Path("multirun/arena/arena.md").read_text()
    assert "| orca" in text and "| request_level" in text, "the page shows all that the folder holds"
    arena(*[key.replace("requests=20", "requests=10") for key in ARENA])
    rows = command._replications(read_runs(Path("multirun")))
    assert rows.groupby("trace")["seed"].apply(sorted).to_dict() == {
        "open_loop, num_requests=10": [0, 1],
        "open_loop, num_requests=20": [0, 0, 1, 1],  # of two policies
    }


@pytest.mark.parametrize(
    "mistake", ["workload.load=0", "replications=1", "backend=cpu", "load=0.5", "workload.slo=null"]
)
def test_a_mistake_is_one_line_before_the_first_run(mistake: str, folder: Path) -> None:
    key = mistake.partition("=")[0]
    assert key in arena(*[given for given in ARENA if not given.startswith(f"{key}=")], mistake)
    assert arena("policy=orca").startswith("traces=traces: no such folder")
    assert not run_folders(folder)


# -- the page ---------------------------------------------------------------------------------------------------------

SCATTER = np.array([10.0, -10, 5, -5])


def replications(policy: str, load: float, attained: Sequence[float], latency: float) -> list[dict[str, Any]]:
    figures = {**dict.fromkeys(FIGURES, 0.0), LATENCY: latency}
    place = {"policy": policy, "trace": "a<b", "slo": "strict", "load": load, "rate": 10 * load}
    return [{**place, "seed": seed, **figures, ATTAINED: share} for seed, share in enumerate(attained)]


@pytest.fixture
def cells() -> pd.DataFrame:
    """`low` and `high` differ by 2% in each replication, however these scatter; `wide` scatters by itself."""
    rows = replications("partial", 0.4, [10.0] * 4, 1.0)
    for load, level in ((0.4, 90), (0.8, 60)):
        rows += replications("high", load, level + SCATTER, 2.0)
        rows += replications("low", load, level - 2 + SCATTER, 4.0)
        rows += replications("wide", load, level - 3 - 3 * SCATTER, 3.0)
    return command._cells(pd.DataFrame(rows))


def test_policies_are_ranked_where_all_have_been_and_told_apart_in_pairs(cells: pd.DataFrame) -> None:
    best = {(row.policy, row.load): row.best for row in cells.itertuples()}
    assert best == {
        **{(policy, load): policy != "low" for policy in ("high", "low", "wide") for load in (0.4, 0.8)},
        ("partial", 0.4): False,
    }
    ranked = command.rank(cells)
    assert ranked["policy"].tolist() == ["high", "low", "wide", "partial"]
    assert ranked[ATTAINED].tolist() == pytest.approx([90, 88, 87, 10])
    assert ranked["best"].tolist() == [1, 0, 1, 0] and set(ranked["cells"]) == {1}


def test_a_policy_whose_runs_failed_but_for_one_is_on_the_page() -> None:
    """One run shows no difference, and is not what the others are compared with."""
    rows = [*replications("high", 0.4, 90 + SCATTER, 2.0), *replications("low", 0.4, 88 + SCATTER, 2.0)]
    cells = command._cells(pd.DataFrame([*rows, *replications("failing", 0.4, [99.0], 1.0)]))
    assert dict(zip(cells["policy"], cells["best"], strict=True)) == {"failing": True, "high": True, "low": False}
    assert np.isnan(cells[f"{ATTAINED} ±"][0])


def test_a_policy_with_fewer_runs_that_is_better_in_each_is_among_the_best() -> None:
    """It is not what the others are compared with."""
    rows = [*replications("high", 0.4, 90 + SCATTER, 2.0), *replications("fewer", 0.4, 92 + SCATTER[:3], 2.0)]
    cells = command._cells(pd.DataFrame(rows))
    assert cells["best"].all() and len(cells) == 2


def test_the_markdown_page_has_a_row_per_policy_and_cell(cells: pd.DataFrame) -> None:
    text = command.markdown(cells, ["SIMULATED with profile <h200>"])
    table = text.partition("## Cells\n\n")[2].partition("\n\n")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    half = 3.182446 * np.std(SCATTER, ddof=1) / 2  # Student's t of 3 degrees of freedom
    assert head[:8] == ["policy", "trace", "slo", "load", "rate", "best", ATTAINED, f"{ATTAINED} ±"]
    assert rows[0][:8] == ["high", "a<b", "strict", "0.4", "4", "True", "90", f"{half:.4g}"]
    assert [row[0] for row in rows] == ["high", "low", "wide", "partial", "high", "low", "wide"], (
        "the best of each load first"
    )
    assert "SIMULATED" in text
