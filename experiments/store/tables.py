"""Results on disk as pandas frames: one row per run of a sweep, one row per request or iteration of a run."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pandas as pd
import yaml

from cbatch import ConfigError, StepRecord
from cbatch.executor import CopyTimes
from experiments.store.run_folder import (
    CONFIG,
    COPIES,
    REQUESTS,
    STEPS,
    SUMMARY,
    TOKENS,
    damage,
    read_summary,
    run_folders,
)
from experiments.store.text import name_of

_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, EOFError, BadZipFile, zlib.error, yaml.YAMLError)
_LATENCIES = ("scheduling_delay_seconds", "ttft_seconds", "tpot_seconds", "end_to_end_seconds")


def load(folder: str | Path) -> pd.DataFrame:
    """One row for each complete run in and below a folder.

    Columns: `name` (policy and chunk), the fields of `about` (`policy`, `chunk`, `model`, `simulated`, `hardware`,
    ...), every setting by its key (`workload.pd_ratio`), every metric by its group and name
    (`throughput.total_tokens_per_second`, `ttft_seconds.p99`), and `folder`.

    Raises:
        ConfigError: there is no such folder, or no complete run in it, or a table of one was cut off.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; give the folder of a run or of a sweep")
    if not (found := run_folders(root)):
        raise ConfigError(f"{root}: holds no finished run; give the folder of a run or of a sweep, or run it again")
    return pd.DataFrame([_row(path) for path in found])


def load_requests(folder: str | Path) -> pd.DataFrame:
    """One row for each request of a run, in the order of their ends; times and latencies in seconds."""
    return _table(folder, REQUESTS, _LATENCIES)


def load_steps(folder: str | Path) -> pd.DataFrame:
    """One row for each iteration of a run: the columns of `cbatch.record.StepRecord`, times in seconds."""
    return _table(folder, STEPS, [name for name in StepRecord._fields if name != "note"])


def load_copies(folder: str | Path) -> pd.DataFrame:
    """One row for each timed iteration of a run: the columns of `cbatch.executor.CopyTimes`, in seconds."""
    if not (Path(folder) / COPIES).is_file():
        return pd.DataFrame(columns=CopyTimes._fields, dtype=float)
    return _table(folder, COPIES, CopyTimes._fields)


def load_tokens(folder: str | Path) -> pd.DataFrame:
    """One row for each generated token of a run, by request and then by time: `request_id` and `time` in seconds."""
    path = _file(folder, TOKENS)
    with _reading(path), np.load(path) as arrays:
        ids, times = arrays["request_id"].astype(int), arrays["time"].astype(float)
        return pd.DataFrame({"request_id": ids, "time": times})


def time_between_tokens(folder: str | Path) -> "pd.Series[float]":
    """Seconds between consecutive tokens of a request, of all requests of a run."""
    return load_tokens(folder).groupby("request_id")["time"].diff().dropna()


def _row(folder: Path) -> dict[str, Any]:
    summary = read_summary(folder)
    assert summary is not None, "a run's folder has a summary"
    _check_whole(folder, summary)
    about = summary.pop("about")
    if "code" in about:
        own = " ".join(f"{name}:{digest}" for name, digest in about["code"]["own"].items())
        about["code"] = {**about["code"], "own": own}
    with _reading(folder / CONFIG):
        settings = dict(_flat(yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))))
    with _reading(folder / SUMMARY):
        return {"name": name_of(about), **settings, **dict(_flat(about)), **dict(_flat(summary)), "folder": str(folder)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _table(folder: str | Path, name: str, numbers: Sequence[str]) -> pd.DataFrame:
    """Read a CSV file of a run. numbers: required columns, which hold numbers or nothing."""
    path = _file(folder, name)
    _check_whole(Path(folder), read_summary(Path(folder)))
    with _reading(path):
        frame = pd.read_csv(path, keep_default_na=name != STEPS)
        return frame.assign(**{column: pd.to_numeric(frame[column]) for column in numbers})


def _check_whole(folder: Path, summary: Mapping[str, Any] | None) -> None:
    """Raises ConfigError if a table of a complete run was cut off since."""
    if summary is not None and (problem := damage(folder, summary)):
        raise ConfigError(problem)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises ConfigError if `path`, which is read within this context, was changed after the run."""
    try:
        yield
    except (OSError, *_MALFORMED) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise ConfigError(f"{path}: is not as a run writes it ({what}); run it again") from error


def _file(folder: str | Path, name: str) -> Path:
    path = Path(folder) / name
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the folder of a finished run")
    return path
