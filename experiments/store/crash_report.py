"""`unfinished.json`: the state of a run that is not complete, whatever ends it.

    begun        the claim of the process (`experiments.store.claim`); if the process has ended, it was killed, perhaps for lack
                 of memory
    failed       the error with its traceback, and the state of all requests and KV blocks
    terminated   the same after SIGTERM, which job schedulers send at the time limit

It is removed when the run is complete and has a `summary.json`.
"""

import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from cbatch import CbatchError
from cbatch.errors import Interruption, ResultsError
from experiments.store.claim import UNFINISHED, read_state
from experiments.store.provenance import now, write_json

Facts = Callable[[], Mapping[str, Any]]
"""Returns facts about a run to store with its error, at the time of the error."""


class TerminatedError(Interruption):
    """SIGTERM was received. Not an `Exception`: only the run folder and the command line handle it."""


@contextmanager
def report_crashes(folder: Path, begun: Mapping[str, Any], facts: Facts) -> Iterator[None]:
    """Has `unfinished.json` say failed or terminated after an error. begun: the claim.

    Raises:
        ResultsError: the folder can no longer be written.
        CbatchError: in place of any other exception; it names the file, which has the traceback.
        TerminatedError: SIGTERM was received.
    """
    try:
        with sigterm_raises():
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        status = "terminated" if isinstance(error, TerminatedError) else "failed"
        with suppress(OSError):  # the disk may be what failed
            report = {**begun, "status": status, "ended": now(), "error": _message(error), **facts()}
            lines = "".join(traceback.format_exception(error)).splitlines()
            write_json(folder / UNFINISHED, {**report, "traceback": lines})
        named = _named(error, folder)
        raise named from (None if named is error else error)


def was_killed(folder: Path, since: datetime) -> bool:
    """Whether a run began in this folder at `since` or later, and its end was not reported (it may still be running)."""
    state, second = read_state(folder), since.astimezone().replace(microsecond=0)  # as stored
    return state.get("status") == "begun" and datetime.fromisoformat(state["begun"]) >= second


def _named(error: BaseException, folder: Path) -> BaseException:
    """Returns the error for the command line."""
    see = f"see {folder / UNFINISHED}"
    if isinstance(error, TerminatedError):
        return TerminatedError(f"terminated; {see}")
    if isinstance(error, ResultsError) or not isinstance(error, Exception):
        return error
    if (
        isinstance(error, OSError)
        and isinstance(error.filename, str)
        and not Path(error.filename).is_relative_to(folder)
    ):
        return error  # a file of something else
    if isinstance(error, OSError):
        why = error.strerror or error
        return ResultsError(f"{folder}: {why}; make room, or choose another folder with output=")
    return CbatchError(f"{_message(error)}; {see}")


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Has SIGTERM raise `TerminatedError` in the main thread, unless another handler is installed."""
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
