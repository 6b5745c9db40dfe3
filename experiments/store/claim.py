"""`unfinished.json`: the state of a folder whose results are incomplete: which process is writing them, or why it ended.

    begun        a process has claimed the folder; if the process no longer exists, it was killed, perhaps for lack of memory
    failed       the error with its traceback
    terminated   the same after SIGTERM, which job schedulers send at the time limit

The file is removed when the results are complete. A claim is a lock on an empty file, `.lock`, which the system releases
however the process ends.
"""

import json
import os
import signal
import socket
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from errno import ENOENT, ENOSPC
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from filelock import FileLock, Timeout

from cbatch import CbatchError, ConfigError
from cbatch.errors import Interruption, ResultsError, type_and_message
from experiments.store.provenance import now, write_json

LOCK, UNFINISHED = ".lock", "unfinished.json"

_PROBE = 4096  # bytes
_PATIENCE = 0.2  # seconds; another process may hold the lock briefly in `check_free`


class ClaimedError(ResultsError):
    """Another process holds the folder. who: describes that process."""

    def __init__(self, folder: Path) -> None:
        claim = {"process": "?", "host": "?", "begun": "just now", **read_state(folder)}
        self.who = f"process {claim['process']} on {claim['host']}"
        remedy = "wait for its end, or give another name"
        super().__init__(f"{folder}: is in use since {claim['begun']} by {self.who}; {remedy}")


@contextmanager
def claimed(folder: Path, of: str = "run") -> Iterator[dict[str, Any]]:
    """Creates a folder and holds it inside the `with`; yields the content of `unfinished.json`. of: kind of the folder's results.

    At the end the file is removed, unless its content has changed. A folder that was new or empty is removed if it is empty
    again, as are new parents.

    Raises ClaimedError if another process holds the folder, OSError if the folder cannot be written or locked.
    """
    missing = missing_folders(folder)
    with ExitStack() as held:
        held.callback(remove_empty, missing)
        folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(_lock(folder))
        if not missing and [path.name for path in folder.iterdir()] == [LOCK]:
            missing.append(folder)  # a concurrent claimant has just created it
        claim = {"status": "begun", "of": of, "process": os.getpid(), "host": socket.gethostname(), "begun": now()}
        try:
            write_json(folder / UNFINISHED, claim)
            yield claim
        finally:
            if read_state(folder) == claim:
                (folder / UNFINISHED).unlink()
            (folder / LOCK).unlink(missing_ok=True)  # a process that waits for this lock then opens a new file


def missing_folders(folder: Path) -> list[Path]:
    """Returns the folder and parents that do not exist, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes the existing folders in turn, up to the first nonempty folder."""
    with suppress(OSError):
        for folder in folders:
            if folder.exists():
                folder.rmdir()


def check_writable(folder: Path, remedy: str = "") -> None:
    """Raises ConfigError, before long work, if not even a small file can be written into a folder. Leaves nothing, no new folder either."""
    missing = missing_folders(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE))
    except OSError as error:
        raise not_writable(folder, error, remedy) from error
    finally:
        remove_empty(missing)


def not_writable(folder: Path, error: OSError, remedy: str = "") -> ConfigError:
    room = "make room, or " * (error.errno == ENOSPC)
    problem = "made" if error.errno == ENOENT else f"written ({error.strerror})"  # /proc takes no new folders
    return ConfigError(f"{folder} cannot be {problem}; {room}{remedy or other_folder(folder)}")


def check_free(folder: Path) -> None:
    """Raises ClaimedError if a process holds the folder now."""
    if (folder / LOCK).exists():
        with _lock(folder):
            pass


def _lock(folder: Path) -> AbstractContextManager[Any]:
    """Locks a folder until the returned context manager exits. Raises ClaimedError if another process holds the folder."""
    try:
        return FileLock(folder / LOCK, timeout=_PATIENCE, thread_local=False).acquire()
    except Timeout:
        raise ClaimedError(folder) from None


def read_state(folder: Path) -> dict[str, Any]:
    """Returns the content of `unfinished.json`; empty without the file."""
    try:
        state = json.loads((folder / UNFINISHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def make_new_folder(stem: Path) -> Path:
    """Creates a folder named `stem`, or `stem_2` and so on if it exists. Raises OSError if no folder can be created."""
    for number in count(1):
        folder = stem if number == 1 else stem.with_name(f"{stem.name}_{number}")
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            if not folder.exists():  # a parent exists, but is not a folder
                raise
    return folder


@contextmanager
def new_run_folder(stem: Path) -> Iterator[Path]:
    """Creates a folder named `stem`, or `stem` and a number; removes the folder at the end if it is still empty."""
    missing = missing_folders(stem.parent)
    folder = make_new_folder(stem)
    try:
        yield folder
    finally:
        remove_empty([folder, *missing])


class TerminatedError(Interruption):
    """SIGTERM was received. Not a subclass of `Exception`: only the run folder and the command line handle it."""


@contextmanager
def report_crashes(folder: Path, begun: Mapping[str, Any]) -> Iterator[None]:
    """Writes "failed" or "terminated" to `unfinished.json` after an error. begun: the claim.

    Raises:
        ResultsError: the folder can no longer be written.
        CbatchError: in place of any other exception; the message names the file with the traceback.
        TerminatedError: SIGTERM was received.
    """
    try:
        with sigterm_raises():
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        status = "terminated" if isinstance(error, TerminatedError) else "failed"
        with suppress(OSError):  # the disk may have failed
            report = {**begun, "status": status, "ended": now(), "error": _message(error)}
            lines = "".join(traceback.format_exception(error)).splitlines()
            write_json(folder / UNFINISHED, {**report, "traceback": lines})
        named = _named(error, folder)
        raise named from (None if named is error else error)


def _named(error: BaseException, folder: Path) -> BaseException:
    """Returns the error to show on the command line."""
    see = f"see {folder / UNFINISHED}"
    if isinstance(error, TerminatedError):
        return TerminatedError(f"terminated; {see}")
    if isinstance(error, ResultsError) or not isinstance(error, Exception):
        return error
    if isinstance(error, OSError):
        if isinstance(error.filename, str) and not Path(error.filename).is_relative_to(folder):
            return error  # the file is not the run's
        why = error.strerror or error
        return ResultsError(f"{folder}: {why}; make room, or {other_folder(folder)}")
    return CbatchError(f"{_message(error)}; {see}")


def other_folder(folder: Path) -> str:
    """Returns the remedy for a folder that cannot be used: the key that names another one."""
    return f"choose another {'name with sweep=' if folder.parts[:1] == ('multirun',) else 'folder with output='}"


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Makes SIGTERM raise `TerminatedError` in the main thread, unless another handler is installed."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not ours:
        yield
        return
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise_terminated(signum: int, frame: object) -> None:
    raise TerminatedError("terminated")


def _message(error: BaseException) -> str:
    is_ours = isinstance(error, (CbatchError, TerminatedError))
    return " ".join(str(error).split()) if is_ours else type_and_message(error)
