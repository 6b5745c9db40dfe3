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
from typing import Any, Never

from tqdm import tqdm

from experiments.config.this_machine import cpu_name
from experiments.store.benchmark_file import write

BLOB = re.compile(r"@reproduce_failure\('[^']*', b'([^']*)'\)")


class Tally:
    """Counts cases by kind. A case that fails while hypothesis shrinks it replaces the larger one that failed before."""

    def __init__(self, what: str, num_cases: int, *, shown: bool) -> None:
        """what, num_cases: to be drawn. shown: draw a bar; into a file, a line now and then."""
        self._what = what
        self._sums: Counter[str] = Counter()
        self._kinds: dict[str, Counter[str]] = defaultdict(Counter)
        self._failures: list[dict[str, str]] = []
        self._case = ""
        self._began = time.perf_counter(), time.process_time()
        self._num_cases, self._shown = num_cases, shown
        self._bar: tqdm[Never] | None = None

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
        if self._shown and self._bar is None:  # not earlier: pytest must let its output through
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

    def write(self, name: str, folder: str, **versions: str) -> None:
        """Write `folder`/cpu/`name`.json; the processes of one run add to it. versions: of further packages."""
        if self._bar is not None:
            self._bar.close()
        wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        figures = {
            **self._sums,
            "failures": self._failures,
            "seconds": round(wall, 1),
            "cpu_seconds": round(cpu, 1),
            "system": platform.platform(terse=True),
            **({"further_versions": versions} if versions else {}),
            "by": {name: dict(sorted(kinds.items())) for name, kinds in self._kinds.items()},
        }
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
        path = Path(folder) / "cpu" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            flock(lock, LOCK_EX)
            earlier = json.loads(path.read_text()) if run and path.exists() else {}
            if earlier.get("run") == run:
                figures = add(earlier, figures)
            write(
                name, cpu_name(), {**figures, "run": run} if run else figures, Path(folder), command="python -m pytest"
            )
        path.with_suffix(".lock").unlink()


def add(earlier: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """What several processes of one run (`pytest -n`) have counted, each a part."""
    total = {**figures, "seconds": max(earlier["seconds"], figures["seconds"])}
    total["failures"] = [*earlier["failures"], *figures["failures"]]
    for name, value in figures.items():
        if name not in ("seconds", "failures") and isinstance(value, int | float):
            total[name] = round(earlier[name] + value, 1)
    kinds = {name: Counter(earlier["by"].get(name, {})) + Counter(counts) for name, counts in figures["by"].items()}
    return {**total, "by": {name: dict(sorted(counts.items())) for name, counts in kinds.items()}}
