"""The complete runs of a folder as one frame: plots, tables and comparisons read runs in no other way."""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import pandas as pd

from cbatch import ConfigError
from experiments.store.labels import code_text, label_runs
from experiments.store.run_folder import SUMMARY, check_whole, read_summary, run_folders
from experiments.store.text import Summary, flat

_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, EOFError, BadZipFile, zlib.error)


def read_runs(folder: str | Path) -> pd.DataFrame:
    """Reads the complete runs in and below a folder: a row for each, in the order of their sweep.

    Columns:
        label: the policy, and what else varies among the runs but a seed; repeated runs share a label, as in plots.
        Every setting that the run depends on by its key (`policy`, `workload.pd_ratio`), the fields of `about` (`model`,
        `simulated`, `hardware`, ...), and every figure by its group and name (`ttft_seconds.p99`). NaN where a run has none.
        folder: the run's folder, as text. summary: the dictionary of summary.json.

    Raises:
        ConfigError: there is no such folder, no complete run in it, or a file of a run was changed.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; give the folder of a run or of a sweep")
    if not (folders := run_folders(root)):
        raise ConfigError(f"{root}: holds no finished run; give the folder of a run or of a sweep, or run it again")
    return frame_of((path, _read(path)) for path in folders)


def frame_of(results: Iterable[tuple[Path, Summary]]) -> pd.DataFrame:
    """Makes the frame of `read_runs` from the folder and the summary of each result."""

    def place(row: Mapping[str, Any]) -> tuple[str, int, str]:
        """Returns the sweep's folder, the run's number in the sweep, and the date of single runs."""
        about = row["summary"]["about"]
        return str(Path(row["folder"]).parent), about.get("number") or 0, about.get("date") or ""

    rows: list[dict[str, Any]] = sorted((_row(*result) for result in results), key=place)
    frame = pd.DataFrame(rows)
    if not frame.empty:
        frame.insert(0, "label", label_runs(frame))
    return frame


def _row(folder: Path, summary: Summary) -> dict[str, Any]:
    about = summary["about"]
    code = {**about.get("code", {}), "own": code_text(about)}
    facts = flat({key: value for key, value in {**about, "code": code}.items() if key != "identity"})
    figures = flat({key: part for key, part in summary.items() if key not in ("about", "settings")})
    return {**about["identity"], **dict(facts), **dict(figures), "folder": str(folder), "summary": summary}


def _read(folder: Path) -> Summary:
    with reading(folder / SUMMARY):
        summary = read_summary(folder)
        assert summary is not None, "a run's folder has a summary"
        if "identity" not in summary["about"]:
            raise ConfigError(f"{folder}: was written by an earlier version, without the run's identity; run it again")
    check_whole(folder, summary)
    return summary


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises ConfigError if `path`, which is read within this context, was changed after the run."""
    try:
        yield
    except (OSError, *_MALFORMED) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise ConfigError(f"{path}: is damaged ({what}); run it again") from error
