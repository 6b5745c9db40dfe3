"""The folder of a capacity search.

simulations.jsonl   settings and code, then a line per simulation, appended as each ends: a search can go on from it
capacity.json       the result and the settings; written last and atomically
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from cbatch import CbatchError, ConfigError
from experiments.capacity.replications import Outcome
from experiments.capacity.search import TooFewError
from experiments.store.claim import claimed, make_folder
from experiments.store.crash_report import UNFINISHED
from experiments.store.run_folder import PLOTS, WITHOUT_EFFECT
from experiments.store.runs import Run
from experiments.store.text import flat

CAPACITY, SIMULATIONS = "capacity.json", "simulations.jsonl"

_EFFORT = ("accuracy", "replications", "cores", "bounds")  # keys that do not affect a simulation
_FILES = {CAPACITY, SIMULATIONS, UNFINISHED, PLOTS}


def read_finished(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result in a folder, if it is of these settings."""
    found = read_capacity(folder)
    wanted = _plain({key: value for key, value in settings.items() if key not in (*WITHOUT_EFFECT, "cores")})
    return found if found and {key: found["settings"].get(key) for key in wanted} == wanted else None


def read_capacity(folder: Path) -> dict[str, Any] | None:
    """The result in a folder; None if it holds none."""
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((folder / CAPACITY).read_text(encoding="utf-8"))
        return found if {"about", "capacity", "settings"} <= found.keys() else None
    return None


def capacity_folders(root: Path) -> list[Path]:
    """The folders of finished searches in and below a folder."""
    return sorted(path.parent for path in root.rglob(CAPACITY) if read_capacity(path.parent) is not None)


def as_run(folder: Path) -> Run:
    """A finished search, to be labelled as a run is."""
    found = read_capacity(folder)
    assert found is not None, "one of `capacity_folders`"
    return Run(folder, dict(flat(found["settings"])), found)


class Simulations:
    """The simulations of a search: those of earlier processes, and those added now."""

    def __init__(self, file: TextIO, done: Mapping[Any, Outcome]) -> None:
        self._file, self._done = file, dict(done)
        self.resumed = len(done)

    def find(self, key: Sequence[float]) -> Outcome | None:
        """key: rate, replication, requests and warm-up."""
        return self._done.get(tuple(key))

    def add(self, outcome: Outcome) -> None:
        self._done[outcome[:4]] = outcome
        self._file.write(json.dumps(outcome) + "\n")
        self._file.flush()


@contextmanager
def open_simulations(folder: Path, settings: Mapping[str, Any], code: Mapping[str, Any]) -> Iterator[Simulations]:
    """Claims the folder and opens its simulations, with those made before if settings and code are the same.

    Nothing is left of a search that ends before its first simulation, or with an error but `TooFewError`.

    Raises:
        ConfigError: the folder holds something else, or cannot be written.
        ClaimedError: another process writes to it.
    """
    others = {path.name for path in folder.iterdir()} - _FILES if folder.is_dir() else set()
    if any(not name.startswith(".") for name in others):
        raise ConfigError(f"{folder} contains files that do not belong to a search; choose another folder with output=")
    new, head = not folder.exists(), _plain({"settings": _effective(settings), "code": code})
    path, useless = folder / SIMULATIONS, False
    make_folder(folder)
    try:
        with claimed(folder / UNFINISHED):
            done = _read(path, head, keep=settings["other_code"] == "keep")
            (folder / CAPACITY).unlink(missing_ok=True)
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in chain([head], done.values()))
                file.flush()
                simulations = Simulations(file, done)
                yield simulations
    except CbatchError as error:
        useless = not isinstance(error, TooFewError)
        raise
    finally:
        if path.is_file() and (useless or len(path.read_text(encoding="utf-8").splitlines()) == 1):
            path.unlink()
        if new:
            with suppress(OSError):  # not empty
                folder.rmdir()


def _read(path: Path, head: Mapping[str, Any], keep: bool) -> dict[Any, Outcome]:
    """The simulations in a file of the same settings and, unless `keep`, code; a line that was cut off is none."""
    if not path.is_file():
        return {}
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    if not lines or any(lines[0].get(key) != head[key] for key in (("settings",) if keep else head)):
        return {}
    found = [_outcome(*line) for line in lines[1:]]
    return {outcome[:4]: outcome for outcome in found}


def _outcome(rate: float, number: int, requests: int, warmup: int, counts: Sequence[Any], *others: Any) -> Outcome:
    return Outcome(rate, number, requests, warmup, tuple(map(tuple, counts)), *others)


def _effective(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in (*WITHOUT_EFFECT, *_EFFORT)}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON returns them."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain
