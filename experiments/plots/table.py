"""The runs of a sweep side by side, as a table in Markdown."""

from pathlib import Path

from experiments.store.headings import COLUMNS, MORE_COLUMNS
from experiments.store.notes import made_text
from experiments.store.provenance import arguments
from experiments.store.run_table import run_table
from experiments.store.selection import select_runs


def text(folder: Path, runs: str = "") -> str:
    """Returns one line per run, or for the runs of several seeds together; below them, the notes on the runs.

    Args:
        runs: only runs whose folder names contain this.

    Raises:
        ConfigError: no finished runs.
    """
    return run_table(*select_runs(folder, runs), (*COLUMNS, *MORE_COLUMNS), "github")


def source(folder: Path, runs: str = "") -> str:
    """Returns a line for the table's file: the command with this process's arguments; dates, commits and versions of the runs."""
    abouts = [summary["about"] for summary in select_runs(folder, runs)[0]["summary"]]
    versions = {", ".join(f"{name} {number}" for name, number in about["versions"].items()) for about in abouts}
    return f"`python -m experiments.plot {arguments()}`; runs of {'; '.join([made_text(abouts), *sorted(versions)])}"
