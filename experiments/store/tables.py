"""Results on disk as pandas frames: one row per run of a sweep, one row per request or iteration of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cbatch import ConfigError, StepRecord
from cbatch.executor import CopyTimes
from cbatch.results.service import NO_CLIENT, Service
from experiments.store.csv_tables import EXTRA, LATENCY_COLUMNS, REQUESTS, STEPS, read_extra
from experiments.store.run_folder import COPIES, TOKENS, read_summary
from experiments.store.runs import Run, check_whole, label_runs, read_runs, reading, seed_keys
from experiments.store.text import flat, name_of

_NAMES = {"client", "session", "tier"}
"""Columns of text, even if it is digits."""


def load(folder: str | Path) -> pd.DataFrame:
    """Loads one row for each complete run in and below a folder.

    Columns: `name` (policy and chunk), `label` (the name, and what else varies among the runs but a seed; repeated runs share one, as in plots), the fields of `about` (`policy`,
    `model`, `simulated`, `hardware`, ...), every setting by its key (`chunk`, `workload.pd_ratio`), `experiment` if one was
    chosen, every metric by its group and name (`throughput.total_tokens_per_second`, `ttft_seconds.p99`), and `folder`. A
    setting that a run does not have, such as another policy's, is NaN.

    Raises:
        ConfigError: there is no such folder, or no complete run in it, or a table of one was cut off.
    """
    return as_frame(read_runs(folder))


def load_requests(folder: str | Path) -> pd.DataFrame:
    """Loads one row for each request of a run, in the order of their ends; times and latencies in seconds.

    `Request.extra` has columns `extra.NAME`.
    """
    return _table(folder, REQUESTS, LATENCY_COLUMNS)


def load_service(folder: str | Path) -> Service | None:
    """Loads the service of a run's clients, with their weights; None if no request names its client."""
    requests = load_requests(folder).dropna(subset="last_token")
    if requests["client"].isna().all():
        return None
    [run] = read_runs(folder)
    prefix = "metrics.client_weights."
    weights = {key.removeprefix(prefix): value for key, value in run.settings.items() if key.startswith(prefix)}
    columns = {field.name: requests[field.name].to_numpy() for field in fields(Service) if field.name in requests}
    return Service(**{**columns, "client": requests["client"].fillna(NO_CLIENT).to_numpy(dtype=str)}, weights=weights)


def load_steps(folder: str | Path) -> pd.DataFrame:
    """Loads one row for each iteration of a run: the columns of `cbatch.record.StepRecord`, times in seconds."""
    return _table(folder, STEPS, [name for name in StepRecord._fields if name != "note"])


def load_copies(folder: str | Path) -> pd.DataFrame:
    """Loads one row for each timed iteration of a run: the columns of `cbatch.executor.CopyTimes`, in seconds."""
    if not (Path(folder) / COPIES).is_file():
        return pd.DataFrame(columns=CopyTimes._fields, dtype=float)
    return _table(folder, COPIES, CopyTimes._fields)


def load_tokens(folder: str | Path) -> pd.DataFrame:
    """Loads one row for each generated token of a run, by request and then by time: `request_id` and `time` in seconds."""
    path = _file(folder, TOKENS)
    with reading(path), np.load(path) as arrays:
        ids, times = arrays["request_id"].astype(int), arrays["time"].astype(float)
        return pd.DataFrame({"request_id": ids, "time": times})


def time_between_tokens(folder: str | Path) -> "pd.Series[float]":
    """Loads the seconds between consecutive tokens of each request of a run; the index is the request's id."""
    return load_tokens(folder).set_index("request_id")["time"].groupby(level=0).diff().dropna()


def as_frame(runs: Sequence[Run]) -> pd.DataFrame:
    """Returns one row for each run, as `load`."""
    rows = []
    for run, label in zip(runs, label_runs(runs, seed_keys(runs), apart=False), strict=True):
        about = {
            key: value for key, value in flat(_code_as_text(run.about)) if key not in run.settings or value is not None
        }
        figures = dict(flat({key: value for key, value in run.summary.items() if key != "about"}))
        names = {"name": name_of(run.about), "label": label}
        rows.append({**names, **run.experiment, **run.settings, **about, **figures, "folder": str(run.folder)})
    return pd.DataFrame(rows)


def _code_as_text(about: Mapping[str, Any]) -> dict[str, Any]:
    if "code" not in about:
        return dict(about)
    own = " ".join(f"{name}:{digest}" for name, digest in about["code"]["own"].items())
    return {**about, "code": {**about["code"], "own": own}}


def _table(folder: str | Path, name: str, numbers: Sequence[str]) -> pd.DataFrame:
    """Reads a CSV file of a run. numbers: required columns, which hold numbers or nothing."""
    path = _file(folder, name)
    check_whole(Path(folder), read_summary(Path(folder)))
    with reading(path):
        empty = [] if name == STEPS else [""]  # a client may be called NA
        own = {str(column): read_extra for column in pd.read_csv(path, nrows=0) if str(column).startswith(EXTRA)}
        types = dict.fromkeys(_NAMES, str)
        frame = pd.read_csv(path, keep_default_na=False, na_values=empty, dtype=types, converters=own)
        return frame.assign(**{column: pd.to_numeric(frame[column]) for column in numbers})


def _file(folder: str | Path, name: str) -> Path:
    path = Path(folder) / name
    if name == TOKENS and not path.is_file() and (Path(folder) / STEPS).is_file():
        raise ConfigError(f"{path}: a streamed run writes no tokens; run it again with stream=off")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the folder of a finished run")
    return path
