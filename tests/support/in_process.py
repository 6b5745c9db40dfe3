"""Runs a command in this process and checks how it ends: it serves everything, or prints one line of error."""

import io
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import NamedTuple

import pytest
from commands import PATIENCE

from cbatch.errors import ConfigError, Interruption, WorkloadError


def message(action: Callable[[], object]) -> str:
    """Returns the one line of the error of settings or workloads that the action must raise."""
    with pytest.raises((ConfigError, WorkloadError)) as error:
        action()
    assert "\n" not in str(error.value)
    return str(error.value)


class Outcome(NamedTuple):
    status: int
    printed: str
    complaint: str
    """The one line on stderr, without its `error: `; empty if there is none."""


def outcome(
    main: Callable[[list[str]], int], argv: list[str], statuses: tuple[int, ...] = (0, 2), num_runs: int = 0
) -> Outcome:
    """Run a command. num_runs: those of a sweep, each of which may fail with a line of its own.

    Raises:
        AssertionError: it ended with another status, or printed more or less than one line of error.
        Exception: the command raised.
    """
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["command", *argv]
    try:
        with in_time(), redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status = main(argv)
    finally:
        sys.argv = before
    lines = err.getvalue().splitlines()
    assert status in statuses, (status, argv, lines)
    if status == 2:
        assert 1 <= len(lines) <= 1 + num_runs, (argv, lines)
        assert all(line.startswith("error: ") and len(line) > len("error: x") for line in lines), (argv, lines)
    else:
        assert lines == [], (argv, lines)
    return Outcome(status, out.getvalue(), lines[0].removeprefix("error: ") if lines else "")


class HangsError(Interruption):
    """Code under test took too long; an `Interruption`, so that it is not handled as an error."""


@contextmanager
def in_time() -> Iterator[None]:
    """
    Raises:
        HangsError: the block takes longer than `PATIENCE`.
    """

    def stop(signum: int, frame: object) -> None:
        raise HangsError(f"no end after {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
