"""The process of a server's engine: a thread that waits for a GPU is late by milliseconds where another thread is busy in Python."""

import multiprocessing
import os
import signal
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from traceback import walk_stack
from typing import Any

from cbatch.calls import call
from experiments.server.engine import Inbox, serve_clients
from experiments.server.settings import ServerSettings


@contextmanager
def engine_of(settings: ServerSettings, folder: Path, **options: Any) -> Iterator[Connection]:
    """Starts the engine, which ends with the `with` at the latest; yields the connection to its inbox and its outbox."""
    context = multiprocessing.get_context("spawn")  # a fork has neither threads nor CUDA
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
        signal.signal(number, signal.SIG_IGN)  # are for the server, which closes the door
    signal.signal(signal.SIGUSR1, _end_plan)
    inbox: Inbox = Inbox()
    Thread(target=_read, args=(server, inbox), daemon=True).start()
    serve_clients(settings, folder, inbox, server.send, **options)


def _end_plan(_: int, frame: Any) -> None:
    """Raises an error in a policy that is running, and may never return: it ends the run, as each of a policy's errors."""
    if any(outer.f_code is call.__code__ for outer, _ in walk_stack(frame)):
        raise CancelledError("the server was told to end three times")  # no `except Exception` handles it


def _read(server: Connection, inbox: Inbox) -> None:
    """Reads the server's messages immediately, so that neither process waits for the other."""
    with suppress(EOFError, OSError):
        while True:
            inbox.put(server.recv())
    os._exit(1)  # the server has ended
