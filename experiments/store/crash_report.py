"""`unfinished.json`: what a run's folder says until the run is finished, so that it says something however the run ends.

    begun        by whom and when; if the process is gone, it was killed: by the system for want of memory, or by hand
    failed       the error with its traceback, and where all requests and KV blocks were then
    terminated   by SIGTERM, as job schedulers send it when time is up; the same

It is gone when the run is complete, which `summary.json` shows.
"""

from __future__ import annotations

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
"""What is to be told of a run beside its error, at the time of that error."""


class TerminatedError(Interruption):
    """SIGTERM came. No `Exception`, so that nothing but the folder and the command line deals with it."""


@contextmanager
def told(folder: Path, facts: Facts) -> Iterator[None]:
    """Keep `unfinished.json` in a run's folder: begun, then failed or terminated if an error passes, else gone at the end.

    Raises:
        ResultsError: the folder cannot be written any more.
        CbatchError: for an error that is none yet; it names the file, which holds the traceback.
        TerminatedError: SIGTERM came.
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
            write_json(
                folder / UNFINISHED,
                {
                    "status": status,
                    **begun,
                    "ended": _now(),
                    "error": _message(error),
                    **facts(),
                    "traceback": "".join(traceback.format_exception(error)).splitlines(),
                },
            )
        raise _named(error, folder) from error


def was_killed(folder: Path, since: datetime) -> bool:
    """Whether a run began in this folder at `since` or later, on this machine, and its process is gone without a word."""
    try:
        said = json.loads((folder / UNFINISHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    whole_second = since.astimezone().replace(microsecond=0)  # as it is written
    recent = datetime.fromisoformat(said["begun"]) >= whole_second
    begun_here = said["status"] == "begun" and said["host"] == socket.gethostname()
    return recent and begun_here and not _is_alive(said["process"])


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # it is somebody else's
    return True


def _named(error: BaseException, folder: Path) -> BaseException:
    """The error to be told on the command line."""
    match error:
        case CbatchError():
            return error
        case TerminatedError():
            return TerminatedError(f"terminated; see {folder / UNFINISHED}")
        case OSError():
            return ResultsError(
                f"{folder}: {error.strerror or error}; make room, or choose another folder with output="
            )
        case _:
            return CbatchError(f"{_message(error)}; see {folder / UNFINISHED}")


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM raises `TerminatedError` where the program stands, unless somebody else handles it already."""
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
