"""Runs the repository's commands: in this process, which is fast, or in a process of their own, as a user would."""

import gc
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch as mock_patch

import pytest
from places import ROOT

QUICK = ("workload.num_requests=20", "workload.length=256")
"""A simulated run of a few milliseconds."""


PATIENCE = 600
"""Seconds after which a test gives up waiting. Tests wait for events; this only ends a test that hangs."""


def environment() -> dict[str, str]:
    """The environment of this process, with the repository and its tests importable, and one thread per process."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).resolve().parent}", "OMP_NUM_THREADS": "1"}


class Ended(NamedTuple):
    """How a command ended, with the names of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def command(module: str, *arguments: str, cwd: Path) -> Ended:
    """Run `python -m experiments.MODULE ARGUMENTS` to its end, in this process: nothing is imported twice."""
    name, out, err = f"experiments.{module}", io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), as_in_a_new_process(cwd, [name, *arguments]):
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
            status: object = 0
        except SystemExit as end:
            status = end.code
    return Ended(status if isinstance(status, int) else int(status is not None), out.getvalue(), err.getvalue())


@contextmanager
def as_in_a_new_process(cwd: Path, argv: list[str]) -> Iterator[None]:
    """Set what a new Python process starts with, and restore it: folder, arguments, environment, warnings, modules of `cwd`."""

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))

    thresholds, modules = gc.get_threshold(), set(sys.modules)
    with chdir(cwd), pytest.MonkeyPatch.context() as patch, mock_patch.dict(os.environ), warnings.catch_warnings():
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", message=".* found in sys.modules after import", module="runpy")
        warnings.showwarning = show
        patch.setattr(sys, "argv", argv)
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.syspath_prepend(str(cwd))
        try:
            yield
        finally:
            gc.set_threshold(*thresholds)
            for name in set(sys.modules) - modules:
                if Path(getattr(sys.modules[name], "__file__", None) or ROOT).is_relative_to(cwd):
                    del sys.modules[name]


def new_process(module: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m experiments.MODULE ARGUMENTS` to its end, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{module}", *arguments],
        cwd=cwd,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start `python -m experiments.run ARGUMENTS` in a process group of its own; its stderr can be read."""
    with sigint_not_ignored():
        return subprocess.Popen(
            [sys.executable, "-m", "experiments.run", *arguments],
            cwd=cwd,
            env=environment(),
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until a condition holds, such as that the process has made a file.

    Raises:
        AssertionError: the process ended first, or took longer than `PATIENCE`.
    """
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, process and process.communicate()
        assert time.monotonic() < end, "the condition does not come to hold"
        time.sleep(0.02)


def errors_at_end(process: subprocess.Popen[str]) -> str:
    """Wait for a process to end; returns what it wrote to stderr."""
    return process.communicate(timeout=PATIENCE)[1]


@contextmanager
def sigint_not_ignored() -> Iterator[None]:
    """Let processes started within receive SIGINT.

    Under nohup, or in the background of a script, SIGINT is ignored, and child processes inherit that. They do not
    inherit a handler: in its place they get the default.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file that this process writes, or one that it starts, may grow beyond `size` bytes.

    Python would cut the bytecode of modules that are imported for the first time, and later fail to read it: none is written.
    """
    import resource  # not on Windows

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with (
            mock_patch.object(sys, "dont_write_bytecode", True),
            mock_patch.dict(os.environ, PYTHONDONTWRITEBYTECODE="1"),
        ):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


IN_PLAN = r"interrupted in policy Waiting, iteration 5, plan\(\) \(waiting_policy\.py:1[78]\)"
WAITING = ("policy=waiting_policy.Waiting", "workload.num_requests=20", "workload.length=64")
"""A run that waits in iteration `policy.at` (-1: none), after making the file `policy.begun`, until a signal ends it."""


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())  # type: ignore[no-any-return]


def few_swept(command: str) -> str:
    """Keeps two of each list of three or more numbers: the middle one, which other commands name, and the one after it.

    Names all stay, as each may be wrong.
    """

    def two(found: re.Match[str]) -> str:
        numbers = found[0].split(",")
        return ",".join(numbers[len(numbers) // 2 :][:2])

    return re.sub(r"(?<==)\d+(,\d+){2,}(?=\s|$)", two, command)


def write_azure_trace(path: Path, num_requests: int = 30) -> Path:
    """A small file in the format of the Azure LLM inference trace of 2023, a request every 50 ms."""
    times = [divmod(15 * 60 + 46 + index * 0.05, 60) for index in range(num_requests)]
    lines = [
        f"2023-11-16 18:{minute:02.0f}:{second:010.7f},{100 + 37 * index % 400},{5 + 11 * index % 40}"
        for index, (minute, second) in enumerate(times)
    ]
    path.write_text("\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]))
    return path
