"""Claims on folders: a lock that the system releases when its process ends, however it ends.

While a process holds a folder, `unfinished.json` there says which one. The lock itself is an empty file, `.lock`.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cbatch.errors import ResultsError
from experiments.store.provenance import now, write_json

LOCK, UNFINISHED = ".lock", "unfinished.json"

_PATIENCE = 0.2  # seconds for `check_free` of another process


class ClaimedError(ResultsError):
    """Another process holds the folder. who: that process, in words."""

    def __init__(self, folder: Path) -> None:
        claim = {"process": "?", "host": "?", "begun": "just now", **read_state(folder)}
        self.who = f"process {claim['process']} on {claim['host']}"
        remedy = "wait for its end, or give another name"
        super().__init__(f"{folder}: is in use since {claim['begun']} by {self.who}; {remedy}")


@contextmanager
def claimed(folder: Path) -> Iterator[dict[str, Any]]:
    """Creates a folder and holds it inside the `with`; yields what `unfinished.json` says.

    At the end the file is removed, unless something else was written to it.

    Raises:
        ClaimedError: another process holds the folder.
        OSError: the folder cannot be written or locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        claim = {"status": "begun", "process": os.getpid(), "host": socket.gethostname(), "begun": now()}
        try:
            write_json(folder / UNFINISHED, claim)
            yield claim
        finally:
            if read_state(folder) == claim:
                (folder / UNFINISHED).unlink()
            (folder / LOCK).unlink(missing_ok=True)  # who waits for this lock takes notice and opens another


def check_free(folder: Path) -> None:
    """Raises ClaimedError if a process holds the folder now."""
    if (folder / LOCK).exists():
        with _locked(folder):
            pass


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / LOCK, timeout=_PATIENCE, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise ClaimedError(folder) from None
    try:
        yield
    finally:
        lock.release()


def read_state(folder: Path) -> dict[str, Any]:
    """Returns what `unfinished.json` says; nothing if there is none."""
    try:
        state = json.loads((folder / UNFINISHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def make_new_folder(stem: Path) -> Path:
    """Creates a folder called `stem`, or `stem_2` and so on if that exists. Raises OSError if none can be created."""
    for number in count(1):
        folder = stem if number == 1 else stem.with_name(f"{stem.name}_{number}")
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            if not folder.exists():  # what exists is a parent, and no folder
                raise
    return folder
