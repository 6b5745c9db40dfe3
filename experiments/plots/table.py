"""The runs of a sweep side by side, as a table in Markdown."""

from pathlib import Path

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
