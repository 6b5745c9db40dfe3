"""`unfinished.json`: the state of a run that is not complete, whatever ends it.

    begun        the claim of the process (`experiments.store.claim`); if it no longer exists, it was killed, perhaps for lack
                 of memory
    failed       the error with its traceback, and the state of all requests and KV blocks
    terminated   the same after SIGTERM, which job schedulers send at the time limit

It is removed when the run is complete and has a `summary.json`.
"""

import json
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from cbatch import CbatchError
from cbatch.errors import Interruption, ResultsError
from experiments.store.claim import Claim, has_ended, release
from experiments.store.provenance import now, write_json

UNFINISHED = "unfinished.json"

Facts = Callable[[], Mapping[str, Any]]
"""Facts about a run to store with its error, at the time of the error."""


class TerminatedError(Interruption):
    """SIGTERM was received. Not an `Exception`: only the run folder and the command line handle it."""


@contextmanager
def report_crashes(folder: Path, begun: Claim, facts: Facts) -> Iterator[None]:
    """Ends the claim of a run's folder: `unfinished.json` is removed, or says failed or terminated after an error.

    Raises:
        ResultsError: the folder can no longer be written.
        CbatchError: in place of any other exception; it names the file, which has the traceback.
        TerminatedError: SIGTERM was received.
    """
    file = folder / UNFINISHED
    try:
        with sigterm_raises():
            yield
        release(file, begun)
    except KeyboardInterrupt:
        release(file, begun)
        raise
    except BaseException as error:
        status = "terminated" if isinstance(error, TerminatedError) else "failed"
        try:
            report = {**begun, "status": status, "ended": now(), "error": _message(error), **facts()}
            lines = "".join(traceback.format_exception(error)).splitlines()
            write_json(file, {**report, "traceback": lines})
        except OSError:  # the disk may be what failed
            release(file, begun)
        named = _named(error, folder)
        raise named from (None if named is error else error)


def was_killed(folder: Path, since: datetime) -> bool:
    """Whether a run began in this folder at `since` or later on this machine, and ended without a report."""
    try:
        said = json.loads((folder / UNFINISHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    recent = datetime.fromisoformat(said["begun"]) >= since.astimezone().replace(microsecond=0)  # as stored
    return recent and said["status"] == "begun" and has_ended(said)


def _named(error: BaseException, folder: Path) -> BaseException:
    """The error for the command line."""
    see = f"see {folder / UNFINISHED}"
    match error:
        case TerminatedError():
            return TerminatedError(f"terminated; {see}")
        case ResultsError():
            return error
        case OSError():
            why = error.strerror or error
            return ResultsError(f"{folder}: {why}; make room, or choose another folder with output=")
        case Exception():
            return CbatchError(f"{_message(error)}; {see}")
        case _:
            return error


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
