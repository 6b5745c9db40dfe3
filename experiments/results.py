"""Results on disk as pandas frames: a row a run for a whole sweep, a row a request or an iteration for one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from cbatch import ConfigError
from experiments.folder import CONFIG, REQUESTS, STEPS, TOKENS, read_summary, run_folders
from experiments.report import name_of


def load(folder: str | Path) -> pd.DataFrame:
    """A row for each complete run in a folder and below.

    Columns: `name` (policy and chunk), what `about` says (`policy`, `chunk`, `model`, `simulated`, `hardware`, ...), every
    setting by its key (`workload.pd_ratio`), every figure by its group and name (`throughput.total_tokens_per_second`,
    `ttft_seconds.p99`), and `folder`.

    Raises:
        ConfigError: there is no such folder, or no complete run in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; give the folder of a run or of a sweep")
    found = run_folders(root)
    if not found:
        raise ConfigError(f"{root}: holds no finished run; give the folder of a run or of a sweep, or run it again")
    return pd.DataFrame([_row(path) for path in found])


def load_requests(folder: str | Path) -> pd.DataFrame:
    """A row for each request of one run, in the order of their ends; times and latencies in seconds."""
    return pd.read_csv(_file(folder, REQUESTS))


def load_steps(folder: str | Path) -> pd.DataFrame:
    """A row for each iteration of one run: the columns of `cbatch.record.StepRecord`, times in seconds."""
    return pd.read_csv(_file(folder, STEPS), keep_default_na=False)


def load_tokens(folder: str | Path) -> pd.DataFrame:
    """A row for each generated token of one run, by request and then by time: `request_id` and `time` in seconds."""
    with np.load(_file(folder, TOKENS)) as arrays:
        return pd.DataFrame({name: arrays[name] for name in ("request_id", "time")})


def time_between_tokens(folder: str | Path) -> pd.Series[float]:
    """Seconds between consecutive tokens of a request, all requests of one run."""
    tokens = load_tokens(folder)
    return tokens.groupby("request_id")["time"].diff().dropna()


def _row(folder: Path) -> dict[str, Any]:
    summary = read_summary(folder)
    assert summary is not None, "a run's folder has a summary"
    about = summary.pop("about")
    settings = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    return {"name": name_of(about), **dict(_flat(settings)), **dict(_flat(about)), **dict(_flat(summary)),
            "folder": str(folder)}  # fmt: skip


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _file(folder: str | Path, name: str) -> Path:
    path = Path(folder) / name
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the folder of a finished run")
    return path
