"""The process of a server's engine: a thread that waits for a GPU is late by milliseconds where another thread is busy in Python."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from experiments.server.engine import Inbox, Message, serve_clients
from experiments.server.settings import ServerSettings

Receive = Callable[[Any], object]


@contextmanager
def engine_of(
    settings: ServerSettings, folder: Path, receive: Receive, **options: Any
) -> Iterator[Callable[[Message], object]]:
    """Starts the engine, which ends with the `with` at the latest; yields what puts a message into its inbox.

    receive: as for `read_from`.
    """
    context = multiprocessing.get_context("spawn")  # a fork has neither threads nor CUDA
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(settings, folder, theirs), kwargs=options, daemon=True)
    process.start()
    theirs.close()
    read_from(ours, receive)

    def put(message: Message) -> None:
        with suppress(OSError):  # the engine's process has ended, which `read_from` tells
            ours.send(message)

    try:
        yield put
    finally:
        process.kill()


def read_from(connection: Connection, receive: Receive) -> None:
    """Has the running event loop call `receive` with each message of an engine, and with an error when there is nobody at the other end."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            loop.remove_reader(connection.fileno())
            message = "the engine's process has ended"
        receive(message)

    loop.add_reader(connection.fileno(), read)
    os.set_blocking(connection.fileno(), True)  # uvloop clears it; a message longer than the socket's buffer would fail


def _serve(settings: ServerSettings, folder: Path, server: Connection, **options: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # are for the server, which closes the door
    inbox: Inbox = Inbox()
    Thread(target=_read, args=(server, inbox), daemon=True).start()
    serve_clients(settings, folder, inbox, server.send, **options)


def _read(server: Connection, inbox: Inbox) -> None:
    """Reads at once what the server sends: it waits for nobody, and the two never wait for each other."""
    with suppress(EOFError, OSError):
        while True:
            inbox.put(server.recv())
    os._exit(1)  # the server has ended
