"""Which runs of a sweep a plot shows, and what it calls them."""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd

from cbatch import ConfigError
from experiments.plots.style import MOST_SERIES

_IN_NAME = ("policy", "chunk", "chunking", "experiment")


def labelled(runs: pd.DataFrame, without: Collection[str] = ()) -> pd.DataFrame:
    """The runs with a column `label`: policy and chunk, and whatever else was swept. Of equal runs, the first is kept.

    A policy that takes no chunk runs the same for every `chunk=` of a sweep.

    Args:
        without: settings that the plot shows otherwise, on an axis, say.
    """
    given = [dict(pair.split("=", 1) for pair in overrides) for overrides in runs["overrides"]]
    keys = {key.lstrip("+") for pairs in given for key in pairs}
    swept = [
        key for key in sorted(keys) if key not in (*_IN_NAME, *without) and key in runs and runs[key].nunique() > 1
    ]
    labels = runs["name"].copy()
    for key in swept:
        labels += ", " + key.rpartition(".")[2] + "=" + runs[key].map(_short)
    return runs.assign(label=labels).drop_duplicates(subset=["label", *(key for key in without if key in runs)])


def few(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs, if there are few enough to tell apart.

    Raises:
        ConfigError: there are too many.
    """
    if len(runs) > MOST_SERIES:
        raise ConfigError(
            f"{len(runs)} runs are too many for one plot, which shows {MOST_SERIES}; give the folder of one run, "
            "or choose with runs=TEXT, a part of their folders' names"
        )
    return runs


def chosen(runs: pd.DataFrame, text: str) -> pd.DataFrame:
    """The runs whose folder's name holds `text`.

    Raises:
        ConfigError: there is none.
    """
    names = runs["folder"].map(lambda folder: str(folder).rpartition("/")[2])
    kept = runs[names.str.contains(text, regex=False)]
    if kept.empty:
        raise ConfigError(f"runs={text}: no run's folder has this in its name; there are {', '.join(names[:5])} ...")
    return kept


def single(runs: pd.DataFrame) -> pd.Series:
    """The only run.

    Raises:
        ConfigError: there are several.
    """
    if len(runs) > 1:
        raise ConfigError(
            f"this plot shows one run, the folder holds {len(runs)}; give the folder of one, or choose it with "
            "runs=TEXT, a part of its folder's name"
        )
    return runs.iloc[0]


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
