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
from experiments.settings.identity import identity
from experiments.settings.settings import Settings
from experiments.store.claim import LOCK, UNFINISHED, claimed
from experiments.store.result_file import ResultFile
from experiments.store.run_folder import PLOTS

CAPACITY = ResultFile("capacity.json", frozenset({"capacity"}))
SIMULATIONS = "simulations.jsonl"

_EFFORT = ("accuracy", "replications", "cores", "bounds")  # keys that do not affect a simulation
_FILES = {CAPACITY.name, SIMULATIONS, UNFINISHED, LOCK, PLOTS}


class Simulations:
    """The simulations of a search: those of earlier processes, and those added now."""

    def __init__(self, file: TextIO, done: Mapping[Any, Outcome]) -> None:
        self._file, self._done = file, dict(done)
        self.resumed = len(done)

    def find(self, key: Sequence[float]) -> Outcome | None:
        """key: rate, replication, requests and warm-up."""
        return self._done.get(tuple(key))

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self._done.values())

    def add(self, outcome: Outcome) -> None:
        self._done[outcome[:4]] = outcome
        self._file.write(json.dumps(outcome) + "\n")
        self._file.flush()


@contextmanager
def open_simulations(folder: Path, settings: Settings, code: Mapping[str, Any]) -> Iterator[Simulations]:
    """Claims the folder and opens its simulations, with those made before if settings and code are the same.

    Nothing is left of a search that ends before its first simulation, or with an error but `TooFewError`.

    Raises:
        ConfigError: the folder holds something else, or cannot be written.
        ClaimedError: another process writes to it.
    """
    others = {path.name for path in folder.iterdir()} - _FILES if folder.is_dir() else set()
    if any(not name.startswith(".") for name in others):
        raise ConfigError(f"{folder} contains files that do not belong to a search; choose another folder with output=")
    simulated = {key: value for key, value in identity(settings).items() if key not in _EFFORT}
    new, head = not folder.exists(), {"settings": simulated, "code": code}
    path, useless = folder / SIMULATIONS, False
    try:
        with claimed(folder):
            done = _read(path, head, keep=settings.other_code == "keep")
            (folder / CAPACITY.name).unlink(missing_ok=True)
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
    found = [Outcome._make([*line[:4], tuple(map(tuple, line[4])), *line[5:]]) for line in lines[1:]]
    return {outcome[:4]: outcome for outcome in found}
