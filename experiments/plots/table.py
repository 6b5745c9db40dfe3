"""The runs of a sweep side by side, as a table in Markdown."""

from pathlib import Path

from experiments.store.provenance import arguments
from experiments.store.runs import label_seeds
from experiments.store.selection import omitted_text, select_runs
from experiments.store.text import COLUMNS, MORE_COLUMNS, sweep_text


def text(folder: Path, runs: str = "") -> str:
    """One line per run, or for the runs of several seeds together; below them, which runs are left out and why, and where the times come from.

    Args:
        runs: only runs whose folder names contain this.

    Raises:
        ConfigError: no finished runs.
    """
    shown, omitted = select_runs(folder, runs)
    rows = list(zip(label_seeds(shown), (run.summary for run in shown), strict=True))
    return sweep_text(rows, omitted_text(omitted), {**COLUMNS, **MORE_COLUMNS}, "github")


def source(folder: Path, runs: str = "") -> str:
    """A line for the table's file: the command with this process's arguments; dates, commits and versions of the runs."""
    abouts = [run.about for run in select_runs(folder, runs)[0]]
    stamps = {f"{about['date'][:10]}, {about.get('commit') or 'commit not recorded'}" for about in abouts}
    versions = {", ".join(f"{name} {number}" for name, number in about["versions"].items()) for about in abouts}
    made = "; ".join([*sorted(stamps), *sorted(versions)])
    return f"`python -m experiments.plot {arguments()}`; runs of {made}"
