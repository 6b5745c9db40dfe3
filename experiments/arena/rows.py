"""The cells and capacities of a folder as rows, with the policies that cannot be told apart from the best of each cell."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.arena.cell import CELL
from experiments.capacity.folder import CAPACITY
from experiments.store.intervals import Mean, compare, mean_of
from experiments.store.notes import notes_of
from experiments.store.runs import ERRORS, Run, label_runs

_SHOWN_APART = ("load", "slo", "workload", "accuracy", "cores")  # in columns of their own, or without effect


class Row(NamedTuple):
    """One policy in one cell. figures: by key of `cell.FIGURES`. best: it cannot be told apart from the best policy's attainment."""

    policy: str
    trace: str
    slo: str
    load: float
    rate: float
    figures: Mapping[str, Mean]
    attained: Mapping[int, float]
    best: bool = False

    @property
    def share(self) -> float:
        """Mean attainment."""
        return self.figures["attainment.share"].mean


class Capacity(NamedTuple):
    """One capacity, in requests per second; of_bound: the share of what any policy can sustain, None without bounds=true."""

    policy: str
    trace: str
    slo: str
    rate: float
    low: float
    high: float
    of_bound: float | None


class Board(NamedTuple):
    """Everything that the pages show. notes: where the figures come from, and what failed."""

    rows: Sequence[Row]
    capacities: Sequence[Capacity]
    notes: Sequence[str]


def read_board(root: Path) -> Board:
    """Reads what is finished in and below a folder."""
    cells, searches = CELL.runs(root), CAPACITY.runs(root)
    rows = [_row(run, label) for run, label in zip(cells, _labels(cells), strict=True)]
    capacities = [_capacity(run, label) for run, label in zip(searches, _labels(searches), strict=True)]
    runs = [*cells, *searches]
    notes = [_made(runs), *notes_of(run.about for run in runs), *_failed(root)]
    return Board(_mark_best(rows), sorted(capacities, key=_order), notes)


def _labels(runs: Sequence[Run]) -> list[str]:
    """The policies, and what else varies among runs of one kind that has no column of its own."""
    keys = {key for run in runs for key in run.settings if key.split(".")[0] in _SHOWN_APART}
    return label_runs(runs, {*keys, *_SHOWN_APART}, apart=False)


def _made(runs: Sequence[Run]) -> str:
    """How much was simulated, when and by which code."""
    seconds = sum(run.summary.get("cell", run.summary.get("capacity"))["cpu_seconds"] for run in runs)
    dates, commits = (sorted({str(run.about[key])[:12] for run in runs}) for key in ("date", "commit"))
    days = sorted({date[:10] for date in dates})
    span = " to ".join(dict.fromkeys((days[0], days[-1])))
    made = f"{len(runs)} simulated, {seconds:,.0f} s of processor time, {span}"
    return f"{made}, commit {', '.join(commits)}"


def _row(run: Run, label: str) -> Row:
    cell, values = run.summary["cell"], run.summary["by_replication"]
    figures = {key: mean_of(column) for key, column in values.items()}
    attained = dict(enumerate(values["attainment.share"]))
    return Row(label, _trace(run), run.about["slo"], cell["load"], cell["rate"], figures, attained)


def _capacity(run: Run, label: str) -> Capacity:
    found, regret = run.summary["capacity"], run.summary.get("regret")
    ends = found["requests_per_second"], found["low"], found["high"]
    return Capacity(label, _trace(run), run.about.get("slo", "none"), *ends, regret and regret["capacity"])


def _trace(run: Run) -> str:
    return str(run.about["workload"]).removeprefix("traces/")


def _mark_best(rows: Sequence[Row]) -> list[Row]:
    """The rows by cell, the highest attainment first, with `best`: paired by replication, as all policies serve the same requests."""
    ordered = sorted(rows, key=_order)
    first: dict[Any, Row] = {}
    for row in ordered:
        first.setdefault((row.trace, row.slo, row.load), row)
    return [row._replace(best=_as_good(first[row.trace, row.slo, row.load], row)) for row in ordered]


def _order(row: Row | Capacity) -> Any:
    if isinstance(row, Capacity):
        return row.trace, row.slo, -row.rate
    return row.trace, row.slo, row.load, -row.share


def _as_good(best: Row, row: Row) -> bool:
    return row is best or best.attained == row.attained or not compare(best.attained, row.attained, paired=True).apart


def _failed(root: Path) -> list[str]:
    """What the sweeps could not do, by their errors."""
    lines = [line for file in sorted(root.rglob(ERRORS)) for line in file.read_text(encoding="utf-8").splitlines()]
    return [f"not finished: {line}" for line in lines]
