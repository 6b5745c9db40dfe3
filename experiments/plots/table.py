"""The runs of a sweep side by side, as a table in Markdown."""

from pathlib import Path

from experiments.store.headings import COLUMNS, MORE_COLUMNS
from experiments.store.notes import made_text
from experiments.store.provenance import arguments
from experiments.store.run_table import run_table
from experiments.store.runs import select_runs


def text(folder: Path, runs: str = "") -> tuple[str, str]:
    """Returns a line per run, or for the runs of several seeds together, with the notes on the runs; and the table's origin.

    The origin is the command with this process's arguments, and dates, commits and versions of the runs.

    Args:
        runs: only runs whose folder names contain this.

    Raises:
        ConfigError: no finished runs.
    """
    shown, omitted = select_runs(folder, runs)
    abouts = [summary["about"] for summary in shown["summary"]]
    versions = {", ".join(f"{name} {number}" for name, number in about["versions"].items()) for about in abouts}
    origin = f"`python -m experiments.plot {arguments()}`; runs of {'; '.join([made_text(abouts), *sorted(versions)])}"
    return run_table(shown, omitted, (*COLUMNS, *MORE_COLUMNS), "github"), origin
