"""Choosing and labelling the runs of a sweep that a plot shows."""

from collections.abc import Collection
from pathlib import Path

import pandas as pd

from cbatch import ConfigError
from experiments.plots.style import MOST_SERIES
from experiments.store.tables import load

_IN_NAME = ("policy", "chunk", "chunking", "experiment")


def load_runs(folder: Path, text: str = "", most: int = MOST_SERIES) -> pd.DataFrame:
    """The finished runs in a folder whose folder names contain `text`, labelled.

    Raises:
        ConfigError: there are none, or more than `most` with different labels.
    """
    runs = label_runs(choose_runs(load(folder), text))
    if len(runs) > most:
        limit = "one run" if most == 1 else f"at most {most} runs"
        choice = "give the folder of one, or choose with runs=TEXT, a part of folder names"
        raise ConfigError(f"this plot shows {limit}, the folder holds {len(runs)}; {choice}")
    return runs


def choose_runs(runs: pd.DataFrame, text: str) -> pd.DataFrame:
    """The runs whose folder names contain `text`.

    Raises:
        ConfigError: there are none.
    """
    names = runs["folder"].map(lambda folder: str(folder).rpartition("/")[2])
    kept = runs[names.str.contains(text, regex=False)]
    if kept.empty:
        raise ConfigError(f"runs={text}: no folder name contains this; there are {', '.join(names[:5])} ...")
    return kept


def label_runs(runs: pd.DataFrame, without: Collection[str] = ()) -> pd.DataFrame:
    """Add a column `label`: policy, chunk, and everything else that was swept. Of equal runs, only the first is kept.

    Runs are equal, for instance, if `chunk=` was swept under a policy without chunks.

    Args:
        without: settings that the plot shows in another way, such as on an axis.
    """
    given = [dict(pair.split("=", 1) for pair in overrides) for overrides in runs["overrides"]]
    keys = {key.lstrip("+") for pairs in given for key in pairs} - {*_IN_NAME, *without}
    labels = runs["name"].copy()
    for key in sorted(key for key in keys if key in runs and runs[key].nunique() > 1):
        labels += ", " + key.rpartition(".")[2] + "=" + runs[key].map(_shorten)
    return runs.assign(label=labels).drop_duplicates(subset=["label", *(key for key in without if key in runs)])


def _shorten(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
