"""Reads runs, or the replications of capacity searches, from folders, to be compared."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from cbatch import ConfigError
from experiments.capacity.folder import RESULT, read_searches
from experiments.report.headings import CAPACITIES
from experiments.report.replications import with_replications
from experiments.report.text import figures_text
from experiments.store.runs import choose_runs, print_omitted, select_runs


def read_replications(folders: Sequence[Path], text: str = "") -> pd.DataFrame:
    """Reads the results in the folders: a row for each run, or for each replication of a capacity search.

    The columns of `read_runs`, with labels that differ between folders, and: `replication`, `figures` (all figures as text),
    `served` (the workload without its seed), `others` (the settings but the policy's and seeds). Raises ConfigError: folders
    of both kinds, or no such run.

    text: only runs whose folder names or command lines contain this.
    """
    searches = [folder for folder in folders if list(folder.rglob(RESULT))]
    if 0 < len(searches) < len(folders):
        other = next(folder for folder in folders if folder not in searches)
        raise ConfigError(f"compare: {other} holds runs, {searches[0]} a capacity; give one kind")
    parts = []
    for folder in folders:
        if searches:
            rows = choose_runs(read_searches(folder), text).explode("by_replication").copy()
            key = next(key for key in CAPACITIES if key in rows)
            rows = rows.assign(**{key: rows["by_replication"], "figures": rows["by_replication"]})
        else:
            rows, omitted = select_runs(folder, text)
            print_omitted(omitted)
            rows = rows.assign(figures=rows["summary"].map(figures_text))
        parts.append(rows.assign(source=str(folder)))
    return with_replications(pd.concat(parts, ignore_index=True).copy())  # unlike columns make it fragmented
