"""Runs a server's engine in a separate process: a busy Python thread would delay a thread that waits for a GPU by milliseconds."""

import multiprocessing
import os
import signal
import sys
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import c_ulong, py_object, pythonapi
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread, get_ident
from traceback import walk_stack
from typing import Any

from cbatch.errors import call
from experiments.server.clients import Inbox
from experiments.server.engine import serve_clients
from experiments.server.settings import ServerSettings


@contextmanager
def engine_of(settings: ServerSettings, folder: Path, **options: Any) -> Iterator[Connection]:
    """Starts the engine's process, and kills it at the end of the `with`. Yields the connection to the engine."""
    context = multiprocessing.get_context("spawn")  # threads and CUDA do not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(settings, folder, theirs), kwargs=options, daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()


def _serve(settings: ServerSettings, folder: Path, server: Connection, **options: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # handled by the server's process
    signal.signal(signal.SIGUSR1, _end_plan)
    inbox: Inbox = Inbox()
    Thread(target=_read, args=(server, inbox), daemon=True).start()
    serve_clients(settings, folder, inbox, server.send, **options)


class ToldToEndError(CancelledError):
    """No `except Exception` of a policy handles it."""

    def __str__(self) -> str:
        return "the server was told to end three times"


def _end_plan(_: int, frame: Any) -> None:
    """Raises an error inside policies that may never return. Like any policy error, it ends the run."""
    for thread, inner in sys._current_frames().items():
        if any(outer.f_code is call.__code__ for outer, _ in walk_stack(inner)) and thread != get_ident():
            pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread), py_object(ToldToEndError))
    if any(outer.f_code is call.__code__ for outer, _ in walk_stack(frame)):
        raise ToldToEndError  # at once, also in a call that sleeps


def _read(server: Connection, inbox: Inbox) -> None:
    """Reads the server's messages immediately, so that neither process waits for the other."""
    with suppress(EOFError, OSError):
        while True:
            inbox.put(server.recv())
    os._exit(1)  # the server has ended
