"""Reads the tables of one run as frames, with one row per request, iteration or token."""

import csv
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd

from cbatch import ConfigError, RunRecord, StepRecord
from cbatch.results.metrics import Served, share_gaps
from cbatch.results.replicas import COLUMNS
from cbatch.results.service import NO_CLIENT, Service
from experiments.store import csv_tables
from experiments.store.run_folder import REPLICAS, TOKENS, check_whole, read_summary
from experiments.store.runs import read_runs, reading

_NAMES = {"client", "session", "tier", "finish_reason", "reject_reason"}
"""Columns with text, even if the text is digits, or is missing in all rows."""


def read_requests(folder: str | Path) -> pd.DataFrame:
    """Reads one row per request of a run, in the order in which requests ended. Times and latencies are in seconds.

    The requests' `extra` attributes are columns `extra.NAME`.
    """
    return _table(folder, csv_tables.REQUESTS, ["id", *csv_tables.LATENCY_COLUMNS])


def read_replicas(folder: str | Path) -> pd.DataFrame:
    """Reads one row per lifetime of a replica, in the order in which they were asked for. Times are seconds; NaN: did not happen."""
    return pd.read_csv(_file(folder, REPLICAS), keep_default_na=False, na_values=dict.fromkeys(COLUMNS[2:], ""))


def read_service(folder: str | Path) -> Service | None:
    """Reads the service of a run's clients, with their weights. Returns None if no request names its client."""
    requests = read_requests(folder).dropna(subset="end_to_end_seconds")  # served requests
    if requests["client"].isna().all():
        return None
    prefix = "metrics.client_weights."
    [run] = read_runs(folder).to_dict("records")
    weights = {str(key).removeprefix(prefix): value for key, value in run.items() if str(key).startswith(prefix)}
    columns = {field.name: requests[field.name].to_numpy() for field in fields(Service) if field.name in requests}
    return Service(**{**columns, "client": requests["client"].fillna(NO_CLIENT).to_numpy(dtype=str)}, weights=weights)


def read_steps(folder: str | Path) -> pd.DataFrame:
    """Reads one row per iteration of a run, with the columns of `cbatch.record.StepRecord`. Times are in seconds."""
    later = StepRecord._field_defaults  # than runs of earlier versions
    numbers = [name for name in StepRecord._fields if name != "note" and name not in later]
    return _table(folder, csv_tables.STEPS, numbers)


def frame_of_requests(record: RunRecord, served: Served, cached: bool = False) -> pd.DataFrame:
    """Makes the frame of `read_requests` from the record of a run and `collect_served(record)`. cached: see `stated_columns`."""
    extra = csv_tables.extra_names(record.requests)
    paused = any(request.pause is not None for request in record.requests)
    stated = csv_tables.stated_columns(cached, paused, any(request.slo.tpot is not None for request in record.requests))
    names = csv_tables.request_columns(extra, stated, record)
    frame = pd.DataFrame(csv_tables.request_rows(record, served, extra, stated), columns=names)
    own = {name: frame[name].map(csv_tables.read_extra) for name in names[len(names) - len(extra) :]}
    return frame.replace({None: np.nan, "": np.nan}).infer_objects().astype(dict.fromkeys(_NAMES, "str")).assign(**own)


def frame_of_steps(record: RunRecord) -> pd.DataFrame:
    """Makes the frame of `read_steps` from the record of a run."""
    frame = pd.DataFrame(record.steps, columns=StepRecord._fields)
    frame = frame if frame["num_drafts"].any() else frame[list(csv_tables.step_names(drafts=False))]
    if record.pools:
        frame[csv_tables.POOL] = [record.pools[replica] for replica in record.replicas]
    return frame.assign(**{csv_tables.REPLICA: record.replicas}) if record.replicas else frame


def read_tokens(folder: str | Path) -> pd.DataFrame:
    """Reads one row per generated token of a run, ordered by request and then by time: `request_id`, and `time` in seconds."""
    path = _file(folder, TOKENS)
    with reading(path), np.load(path) as arrays:
        ids, times = arrays["request_id"].astype(int), arrays["time"].astype(float)
        return pd.DataFrame({"request_id": ids, "time": times})


def time_between_tokens(folder: str | Path) -> "pd.Series[float]":
    """Reads the seconds between consecutive tokens of each request in a run, as in `share_gaps`. The index is the request's id."""
    gaps = read_tokens(folder).set_index("request_id")["time"].groupby(level=0).diff()
    return pd.Series(share_gaps(gaps.to_numpy()), gaps.index).dropna()


def _table(folder: str | Path, name: str, numbers: Sequence[str]) -> pd.DataFrame:
    """Reads a CSV file of a run. numbers: required columns, which contain numbers or nothing."""
    path = _file(folder, name)
    check_whole(Path(folder), read_summary(Path(folder)))
    with reading(path):
        with path.open(newline="", encoding="utf-8") as file:  # pandas would shift the columns
            header, first = len(next(lines := csv.reader(file), ())), next(lines, None)
        if first is not None and len(first) != header:
            raise ValueError(f"{len(first)} fields below a header of {header}")
        empty = [] if name == csv_tables.STEPS else [""]  # a client may be called NA
        columns = map(str, pd.read_csv(path, nrows=0))
        own = {column: csv_tables.read_extra for column in columns if column.startswith(csv_tables.EXTRA)}
        types = dict.fromkeys(_NAMES, str)
        frame = pd.read_csv(path, keep_default_na=False, na_values=empty, dtype=types, converters=own)
        return frame.assign(**{column: pd.to_numeric(frame[column]) for column in numbers})


def _file(folder: str | Path, name: str) -> Path:
    path = Path(folder) / name
    if name == TOKENS and not path.is_file() and (Path(folder) / csv_tables.STEPS).is_file():
        raise ConfigError(f"{path}: a streamed run writes no tokens; run it again with stream=off")
    if not path.is_file() and name != REPLICAS and read_summary(Path(folder)):
        raise ConfigError(f"{path}: this run has no tables; run it again with tables=true")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the folder of a finished run")
    return path
