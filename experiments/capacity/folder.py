"""The folder of a capacity search.

simulations.jsonl   identity and code, then a line per simulation, appended as each ends: a search can go on from it
capacity.json       the result and the settings; written last and atomically
"""

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cbatch import CbatchError, ConfigError
from cbatch.errors import ResultsError
from experiments.capacity.search import TooFewError
from experiments.capacity.simulation import Outcome
from experiments.progress import Setting, progress_of
from experiments.settings.command_line import end_with_the_parent
from experiments.store.claim import LOCK, UNFINISHED, claimed, other_folder
from experiments.store.run_folder import PLOTS, read_summary

if TYPE_CHECKING:
    import pandas as pd

RESULT, SIMULATIONS = "capacity.json", "simulations.jsonl"
_EFFORT = ("accuracy", "replications", "cores", "bounds")  # keys that do not affect a simulation
_FILES = {RESULT, SIMULATIONS, UNFINISHED, LOCK, PLOTS}


def read_searches(root: Path) -> "pd.DataFrame":
    """Reads the finished searches in and below a folder as `experiments.store.runs.read_runs` does. Names damaged results on stderr.

    Raises ConfigError if there is no finished search.
    """
    from experiments.store.runs import Omitted, frame_of, print_omitted  # loads pandas

    results = {path.parent: read_summary(path.parent, RESULT) or {} for path in sorted(root.rglob(RESULT))}
    whole = {folder: summary for folder, summary in results.items() if {"capacity", "by_replication"} <= summary.keys()}
    damaged = [str(folder / RESULT) for folder in results if folder not in whole]
    if not whole:
        raise ConfigError(f"{''.join(damaged[:1]) or root}: holds no finished search; run it again")
    print_omitted(Omitted(path, f"{RESULT} is damaged; run it again") for path in damaged)
    return frame_of(whole.items())


@dataclass(eq=False)
class Simulations:
    """The simulations of a search: those that earlier processes kept, and new ones.

    file: each new one is appended. outcomes: by rate, replication, requests and warm-up. simulate: called with replication, rate,
    requests and warm-up, in the pool's processes. progress: as of a run, of the replications to the next estimate.
    """

    file: TextIO
    outcomes: dict[Any, Outcome]
    simulate: Callable[..., Outcome]
    pool: Executor | None
    progress: Setting = "off"

    def __call__(self, pairs: Sequence[tuple[int, float]], requests: int, warmup: int) -> list[Outcome]:
        """Returns the outcomes for pairs of (replication, rate); simulates those that are not kept."""
        keys = [(rate, number, requests, warmup) for number, rate in pairs]
        new = [(key[1], key[0], requests, warmup) for key in keys if key not in self.outcomes]
        made = (self.pool.map if self.pool else map)(self.simulate, *zip(*new, strict=True)) if new else ()
        for outcome in progress_of(self.progress, made, len(new), "replications"):
            self.outcomes[outcome[:4]] = outcome
            self.file.write(json.dumps(outcome) + "\n")
            self.file.flush()
        return [self.outcomes[key] for key in keys]


@contextmanager
def open_simulations(
    folder: Path,
    identity: Mapping[str, Any],
    code: Mapping[str, Any],
    simulate: Callable[..., Outcome],
    *,
    cores: int,
    other_code: bool,
    progress: Setting = "off",
) -> Iterator[Simulations]:
    """Claims the folder and opens its simulations, with those kept there if identity and code are the same.

    A search that ends before its first simulation, or with an error other than `TooFewError`, leaves nothing.

    cores: processes that simulate; 1 is this process. other_code: whether simulations of other code are kept as well. progress: see `Simulations`.
    Raises ConfigError: the folder holds something else, or cannot be written; ClaimedError: another process writes to it.
    """
    others = {path.name for path in folder.iterdir()} - _FILES if folder.is_dir() else set()
    if any(not name.startswith(".") for name in others):
        raise ConfigError(f"{folder} contains files that do not belong to a search; {other_folder(folder)}")
    effective = {key: value for key, value in identity.items() if key not in _EFFORT}
    path, head = folder / SIMULATIONS, {"settings": effective, "code": code}
    with claimed(folder), ExitStack() as held:
        kept, pool = _read(path, head, other_code), None
        (folder / RESULT).unlink(missing_ok=True)
        if cores > 1:
            pool = ProcessPoolExecutor(cores, initializer=_begin_worker)
            held.callback(pool.shutdown, cancel_futures=True)
        try:
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in chain([head], kept.values()))
                file.flush()
                yield Simulations(file, kept, simulate, pool, progress)
        except OSError as error:
            if error.filename:
                raise
            raise ResultsError(f"{path}: {error.strerror}; make room, and give the same command again") from error
        except CbatchError as error:
            if not isinstance(error, TooFewError):
                kept.clear()
            raise
        finally:
            if not kept:
                path.unlink()


def _begin_worker() -> None:
    """Restores the default handlers of signals in a worker: its parent's would print a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    end_with_the_parent()


def _read(path: Path, head: Mapping[str, Any], other_code: bool) -> dict[Any, Outcome]:
    """Returns the simulations in a file with this head; ignores a truncated line."""
    if not path.is_file():
        return {}
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    if not lines or any(lines[0].get(key) != head[key] for key in (("settings",) if other_code else head)):
        return {}
    outcomes = [Outcome(*line) for line in lines[1:]]
    return {outcome[:4]: outcome for outcome in outcomes}
