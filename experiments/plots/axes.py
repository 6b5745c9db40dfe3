"""Swept settings on the axes of plots."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from cbatch import ConfigError
from cbatch.described import class_name
from experiments.report.headings import OFFERED, heading_of
from experiments.settings.settings import GROUPS

FUTURE = " (reads the future)"


class Axis(NamedTuple):
    """A swept setting.

    keys: possible keys; the first key that varies is drawn. example: values to sweep. categories: the text of each value, if the
    values are names.
    """

    text: str
    keys: Sequence[str]
    example: str
    log: bool = False
    categories: Mapping[Any, str] = {}


_RATES = ("workload.arrivals.rate", "workload.rate", "workload.load", "workload.speed", "workload.rate_scale")
_PD_RATIOS = ("workload.pd_ratio", "workload.lengths.pd_ratio")
AXES = {
    "rate": Axis(heading_of(OFFERED).axis, _RATES, "1,2,4,8"),  # measured, in requests/s for each of these settings
    "pd": Axis("P:D ratio [prefill / decode tokens]", _PD_RATIOS, "2,5,14,28", log=True),
    "kv": Axis("size of the KV cache [tokens]", ("kv_tokens",), "20000,40000,80000", log=True),
}
"""X axes by name in `x`."""

_SETTINGS = {
    **dict.fromkeys(("workload.arrivals.rate", "workload.rate"), "rate of arrivals, as set [1/s]"),
    "workload.length": "length of a request [tokens]",
    "workload.sessions": "sessions at a time",
    "workload.load": "offered rate [share of the bound B3]",
    "batch": "largest batch [requests]",
    "max_running": "requests admitted at once",
    "chunk": "chunk [tokens]",
    "max_tokens": "largest number of tokens in an iteration",
    "prefix_cache": "prefix cache",
    "drafter.alpha": "acceptance rate of drafts",
    "backend.replicas": "replicas",
    "backend.pools": "replicas of each role",
    "backend.router": "router",
    "backend.staleness": "age of the router's reports [s]",
    "backend.tensor_parallel": "GPUs in tensor parallelism",
}
"""Names of settings, by key."""


def axis_of(key: str) -> Axis:
    """Returns the axis of one setting."""
    if pool := re.fullmatch(r"backend\.pools\.([\w-]+)\.(.+)", key):
        of_pool = _SETTINGS.get(f"backend.{pool[2]}", _SETTINGS.get(pool[2], pool[2]))
        return Axis(f"pool {pool[1]}: {of_pool}", (key,), "1,2,4")
    named = (axis._replace(keys=(key,)) for axis in AXES.values() if key in axis.keys and key not in _RATES)
    return next(named, Axis(_SETTINGS.get(key, key), (key,), "NAME,NAME" if key in GROUPS else "1,2,4"))


def check_swept(runs: pd.DataFrame, folder: Path, name: str, axis: Axis) -> None:
    """Raises ConfigError if no setting of an axis varies. name: as the user wrote it."""
    if any(key in runs and runs[key].nunique() > 1 for key in axis.keys):
        return
    if name not in AXES and axis.keys[0] not in runs:
        keys = [*map(str, runs)]
        parts = [key for key in keys if f".{name}." in f".{key}" and runs[key].astype(str).nunique() > 1]
        near = " or ".join(parts[:3] or get_close_matches(name, [*AXES, *keys], 3)) or "one of config.yaml"
        raise ConfigError(f"x={name}: no run has this setting; did you mean {near}?")
    has = [key for key in axis.keys if key in runs and runs[key].notna().any()]
    key, other = [*has, axis.keys[0]][0], "workload=open_loop " * (name == "rate" and not has)
    remedy = f"sweep it with -m {other}{key}={axis.example}"
    raise ConfigError(f"{folder}: needs runs with several values of {key}; {remedy}")


def with_names(axis: Axis, runs: pd.DataFrame, labels: Mapping[str, str]) -> Axis:
    """Returns an axis of one setting with its categories, if not all values are numbers. labels: texts in place of values."""
    values = runs[axis.keys[0]].dropna().unique().tolist() if len(axis.keys) == 1 else []
    if pd.to_numeric(pd.Series(map(str, values)), errors="coerce").notna().all():
        return axis
    switches = {True: "on", False: "off"}  # as on a command line
    names = {value: switches[value] if isinstance(value, bool) else class_name(str(value)) for value in values}
    texts = {value: labels.get(str(value), labels.get(name, name)) for value, name in names.items()}
    if "belady" in texts and axis.keys[0] == "eviction":
        texts["belady"] += FUTURE
    return axis._replace(categories=texts)
