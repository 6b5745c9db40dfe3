"""Counts the drawn cases of a long test: a progress bar while it runs, a results file at its end."""

import json
import os
import platform
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Never
from uuid import uuid4

from tqdm import tqdm

from experiments.settings.this_machine import cpu_name
from experiments.store.benchmark_file import write

BLOB = re.compile(r"@reproduce_failure\('[^']*', b'([^']*)'\)")


class Tally:
    """Counts cases by kind, and adds them to a results file after each test, so that a run cut short keeps what it has counted.

    A case that fails while hypothesis shrinks it replaces the larger one that failed before.
    """

    def __init__(self, what: str, num_cases: int, name: str, folder: str | None, **versions: str) -> None:
        """
        what, num_cases: to be drawn. versions: of further packages.
        folder: show a bar (into a file, a line now and then) and write `folder`/cpu/`name`.json; the processes of one run
            (`pytest -n`) add to it.
        """
        self._what, self._num_cases, self._versions = what, num_cases, versions
        self._path = folder and Path(folder).resolve() / "cpu" / f"{name}.json"  # tests change the current folder
        self._run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid4().hex
        self._case = ""
        self._bar: tqdm[Never] | None = None
        self._began = time.perf_counter()
        self._forget()

    def _forget(self) -> None:
        self._sums: Counter[str] = Counter()
        self._kinds: dict[str, Counter[str]] = defaultdict(Counter)
        self._failures: list[dict[str, str]] = []
        self._cpu = time.process_time()

    def count(self, sums: Mapping[str, int], kinds: Mapping[str, object]) -> None:
        """Count a case. sums: numbers to add up. kinds: its properties, whose values are counted."""
        self._sums.update({self._what: 1, **sums})
        for name, value in kinds.items():
            self._kinds[name][str(value)] += 1
        if self._bar is not None:
            self._bar.update()

    @contextmanager
    def failing(self, case: str) -> Iterator[None]:
        """If the block fails, remember the case that failed."""
        try:
            yield
        except Exception:
            self._case = case
            raise

    @contextmanager
    def found(self, name: str) -> Iterator[None]:
        """Keep the failure of the block that draws cases, with the smallest failing case and the command that repeats it."""
        if self._path and self._bar is None:  # not earlier: pytest must let its output through
            interval = 0.5 if sys.stderr.isatty() else 60
            self._bar = tqdm(total=self._num_cases, unit=f" {self._what}", mininterval=interval)
        try:
            yield
        except Exception as error:
            blobs = BLOB.findall("\n".join(getattr(error, "__notes__", ())))
            self._failures.append(
                {
                    "in": name,
                    "case": self._case,
                    "error": f"{type(error).__name__}: {error}",
                    "replay": f"-k '[{name}]' --replay={blobs[0]}" if blobs else "",
                }
            )
            raise
        finally:
            if self._path:
                self._write(self._path)

    def _write(self, path: Path) -> None:
        figures = {
            **self._sums,
            "failures": self._failures,
            "seconds": round(time.perf_counter() - self._began, 1),
            "cpu_seconds": round(time.process_time() - self._cpu, 1),
            "system": platform.platform(terse=True),
            **({"further_versions": self._versions} if self._versions else {}),
            "by": {name: dict(sorted(kinds.items())) for name, kinds in self._kinds.items()},
        }
        self._forget()
        path.parent.mkdir(parents=True, exist_ok=True)
        with Path(gettempdir(), f"{self._run}.lock").open("w") as lock:
            flock(lock, LOCK_EX)
            earlier = json.loads(path.read_text()) if path.exists() else {}
            if earlier.get("run") == self._run:
                figures = add(earlier, figures)
            write(path.stem, cpu_name(), {**figures, "run": self._run}, path.parents[1], command="python -m pytest")


def add(earlier: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """What several tests and processes of one run have counted."""
    total = {**figures, "seconds": max(earlier["seconds"], figures["seconds"])}
    total["failures"] = [*earlier["failures"], *figures["failures"]]
    counts = {**earlier, **figures}
    for name in (name for name, value in counts.items() if name != "seconds" and isinstance(value, int | float)):
        total[name] = round(earlier.get(name, 0) + figures.get(name, 0), 1)
    kinds = {name: Counter(earlier["by"].get(name, {})) for name in {**earlier["by"], **figures["by"]}}
    for name, found in figures["by"].items():
        kinds[name].update(found)
    return {**total, "by": {name: dict(sorted(counts.items())) for name, counts in kinds.items()}}
