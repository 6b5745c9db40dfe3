"""`unfinished.json`: the state of a run that is not complete, whatever ends it.

    begun        process, host and time; if the process no longer exists, it was killed, perhaps for lack of memory
    failed       the error with its traceback, and the state of all requests and KV blocks
    terminated   the same after SIGTERM, which job schedulers send at the time limit

It is removed when the run is complete and has a `summary.json`.
"""

import json
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from cbatch.errors import CbatchError, Interruption, ResultsError
from experiments.store.provenance import write_json

UNFINISHED = "unfinished.json"

Facts = Callable[[], Mapping[str, Any]]
"""Facts about a run to store with its error, at the time of the error."""


class TerminatedError(Interruption):
    """SIGTERM was received. Not an `Exception`: only the run folder and the command line handle it."""


@contextmanager
def report_crashes(folder: Path, facts: Facts) -> Iterator[None]:
    """Keeps `unfinished.json` in a run's folder: begun, then failed or terminated after an error; removed at the end.

    Raises:
        ResultsError: the folder can no longer be written.
        CbatchError: in place of any other exception; it names the file, which has the traceback.
        TerminatedError: SIGTERM was received.
    """
    begun = {"process": os.getpid(), "host": socket.gethostname(), "begun": _now()}
    try:
        write_json(folder / UNFINISHED, {"status": "begun", **begun})
        with sigterm_raises():
            yield
        (folder / UNFINISHED).unlink()
    except (Exception, TerminatedError) as error:
        status = "terminated" if isinstance(error, TerminatedError) else "failed"
        with suppress(OSError):  # the disk may be what failed
            report = {"status": status, **begun, "ended": _now(), "error": _message(error), **facts()}
            lines = "".join(traceback.format_exception(error)).splitlines()
            write_json(folder / UNFINISHED, {**report, "traceback": lines})
        raise _named(error, folder) from error


def was_killed(folder: Path, since: datetime) -> bool:
    """Whether a run began in this folder at `since` or later on this machine, and its process ended without a report."""
    try:
        said = json.loads((folder / UNFINISHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    recent = datetime.fromisoformat(said["begun"]) >= since.astimezone().replace(microsecond=0)  # as stored
    begun_here = said["status"] == "begun" and said["host"] == socket.gethostname()
    return recent and begun_here and not _is_alive(said["process"])


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's process
    return True


def _named(error: BaseException, folder: Path) -> BaseException:
    """The error for the command line."""
    match error:
        case CbatchError():
            return error
        case TerminatedError():
            return TerminatedError(f"terminated; see {folder / UNFINISHED}")
        case OSError():
            why = error.strerror or error
            return ResultsError(f"{folder}: {why}; make room, or choose another folder with output=")
        case _:
            return CbatchError(f"{_message(error)}; see {folder / UNFINISHED}")


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise `TerminatedError` in the main thread on SIGTERM, unless another handler is installed."""
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
    text = " ".join(str(error).split())
    return text if isinstance(error, (CbatchError, TerminatedError)) else f"{type(error).__name__}: {text}"


def _now() -> str:
    return f"{datetime.now().astimezone():%Y-%m-%dT%H:%M:%S%z}"
