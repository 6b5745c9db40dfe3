"""The table of a sweep: a row for each label, with means over its runs, and the notes on them."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import pandas as pd
from tabulate import tabulate

from experiments.store.headings import COLUMNS, heading_of
from experiments.store.intervals import mean_of
from experiments.store.notes import notes_of, tail_text
from experiments.store.runs import Omitted, omitted_text
from experiments.store.text import figures_text, format_mean

ONE_REPLICATION = (
    "the seed changes nothing here: 1 replication, no interval; draw from a trace's lengths "
    "(workload=traces/azure_conv_lengths), or compare capacities"
)


def run_table(
    runs: pd.DataFrame, omitted: Iterable[Omitted] = (), columns: Sequence[str] = COLUMNS, tablefmt: str = "simple"
) -> str:
    """Returns a table of runs, which runs are left out, and where the times come from.

    Runs with the same label, such as those of several seeds, share a row: means and their 95% intervals.

    Args:
        runs: a frame of `experiments.store.runs.read_runs`.
        columns: figures by key or pattern; those that no run has are left out.
    """
    shown = matching(columns, runs)
    groups = [(str(label), rows) for label, rows in runs.groupby("label", sort=False)]
    factors = [heading_of(key).factor for key in shown]
    rows = [
        [label, *(format_mean(mean_of([*values])) for _, values in (group[shown].astype(float) * factors).items())]
        for label, group in groups
    ]
    heads = ["run", *(heading_of(key).text for key in shown)]
    aligned = ("left", *["right"] * len(shown))
    table = tabulate(rows, heads, tablefmt=tablefmt, colalign=aligned, disable_numparse=True)
    end = "" if tablefmt == "simple" else "\n"  # Markdown ends a table with an empty line
    tail = tail_text(group["run.counted_requests"].tolist() for _, group in groups)
    origins = notes_of(summary["about"] for summary in runs["summary"])
    replications = _replications_text(dict(groups))
    return "\n".join(filter(None, [table + end, replications, tail, omitted_text(omitted), *origins]))


def matching(patterns: Iterable[str], runs: pd.DataFrame) -> list[str]:
    """Returns the columns of the frame that match one of the patterns and have a value, in the order of the patterns."""
    known = [str(column) for column, has_values in runs.notna().any().items() if has_values]
    return [key for pattern in patterns for key in known if fnmatchcase(key, pattern)]


def _replications_text(groups: Mapping[str, pd.DataFrame]) -> str:
    """Explains rows that average several runs, and names those of fewer runs than others; empty if there are none."""
    several = [group for group in groups.values() if len(group) > 1]
    sizes = [len(group) for group in several if group["summary"].map(figures_text).nunique() > 1]
    equal = len(several) - len(sizes)
    note = f"{ONE_REPLICATION}; so in {equal} of {len(several)} rows" if equal and sizes else ONE_REPLICATION
    if not sizes:
        return note if equal else ""
    fewer = "; ".join(f"{label}: {len(group)}" for label, group in groups.items() if len(group) < max(sizes))
    number = f"{max(sizes)} runs" + (f" (fewer: {fewer})" if fewer else "")
    text = f"mean ± half of the 95% interval over {number}; percentiles are those of each run, averaged"
    return f"{text}\n{note}" if equal else text
