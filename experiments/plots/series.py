"""Choosing and labelling the runs of a sweep that a plot shows."""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd

from cbatch import ConfigError
from experiments.plots.style import MOST_SERIES

_IN_NAME = ("policy", "chunk", "chunking", "experiment")


def label_runs(runs: pd.DataFrame, without: Collection[str] = ()) -> pd.DataFrame:
    """Add a column `label`: policy, chunk, and everything else that was swept. Of equal runs, only the first is kept.

    Runs are equal, for instance, if `chunk=` was swept under a policy without chunks.

    Args:
        without: settings that the plot shows in another way, such as on an axis.
    """
    given = [dict(pair.split("=", 1) for pair in overrides) for overrides in runs["overrides"]]
    keys = {key.lstrip("+") for pairs in given for key in pairs}
    swept = [
        key for key in sorted(keys) if key not in (*_IN_NAME, *without) and key in runs and runs[key].nunique() > 1
    ]
    labels = runs["name"].copy()
    for key in swept:
        labels += ", " + key.rpartition(".")[2] + "=" + runs[key].map(_shorten)
    return runs.assign(label=labels).drop_duplicates(subset=["label", *(key for key in without if key in runs)])


def require_few(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs.

    Raises:
        ConfigError: there are more than one plot can tell apart.
    """
    if len(runs) > MOST_SERIES:
        raise ConfigError(
            f"{len(runs)} runs are too many for one plot, which shows {MOST_SERIES}; give the folder of one run, "
            "or choose with runs=TEXT, a part of their folders' names"
        )
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


def require_one(runs: pd.DataFrame) -> pd.Series:
    """Returns the only run.

    Raises:
        ConfigError: there are several.
    """
    if len(runs) > 1:
        raise ConfigError(
            f"this plot shows one run, the folder holds {len(runs)}; give the folder of one, or choose it with "
            "runs=TEXT, a part of its folder's name"
        )
    return runs.iloc[0]


def _shorten(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
