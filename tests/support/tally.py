"""Counts the drawn cases of a long test, in a results file."""

import json
import os
import platform
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from uuid import uuid4

from filelock import FileLock

from experiments.settings.this_machine import cpu_name
from experiments.store.provenance import write_benchmark

BLOB = re.compile(r"@reproduce_failure\('[^']*', b'([^']*)'\)")


class Tally:
    """Counts cases by kind, and adds them to a results file after each test, so that a run cut short keeps what it has counted.

    A case that fails while hypothesis shrinks it replaces the larger one that failed before.
    """

    def __init__(self, what: str, name: str, folder: str | None, **versions: str) -> None:
        """
        what: is drawn. folder: write `folder`/cpu/`name`.json, to which the processes of one run (`pytest -n`) add.
        versions: of further packages.
        """
        self._what, self._versions = what, versions
        self._path = folder and Path(folder).resolve() / "cpu" / f"{name}.json"  # tests change the current folder
        self._run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid4().hex
        self._case = ""
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
        try:
            yield
        except Exception as error:
            blobs = BLOB.findall("\n".join(getattr(error, "__notes__", ())))
            replay = f"-k '[{name}]' --replay={blobs[0]}" if blobs else ""
            failure = {"in": name, "case": self._case, "error": f"{type(error).__name__}: {error}", "replay": replay}
            self._failures.append(failure)
            raise
        finally:
            if self._path:
                self._write(self._path)

    def _write(self, path: Path) -> None:
        """Adds what was counted to what the file says of this run."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(Path(gettempdir(), f"{self._run}.lock")):
            earlier: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
            if earlier.get("run") != self._run:
                earlier = {"by": {}}
            kinds = {name: Counter(counts) for name, counts in earlier["by"].items()}
            for name, counts in self._kinds.items():
                kinds.setdefault(name, Counter()).update(counts)
            sums = Counter({name: value for name, value in earlier.items() if isinstance(value, int)})
            cpu = earlier.get("cpu_seconds", 0.0) + time.process_time() - self._cpu
            figures = {
                **(sums + self._sums),
                "failures": [*earlier.get("failures", ()), *self._failures],
                "seconds": max(earlier.get("seconds", 0.0), round(time.perf_counter() - self._began, 1)),
                "cpu_seconds": round(cpu, 1),
                "system": platform.platform(terse=True),
                **({"further_versions": self._versions} if self._versions else {}),
                "by": {name: dict(sorted(counts.items())) for name, counts in kinds.items()},
                "run": self._run,
            }
            write_benchmark(path.stem, cpu_name(), figures, path.parents[1], command="python -m pytest")
        self._forget()
