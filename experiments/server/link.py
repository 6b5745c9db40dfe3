"""The process of a server's engine: a thread that waits for a GPU is late by milliseconds where another thread is busy in Python."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from experiments.server.engine import Message, serve_clients
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
    inbox, (ours, theirs) = context.Queue(), context.Pipe(duplex=False)
    inbox.cancel_join_thread()  # an engine that has failed reads no more
    process = context.Process(target=_serve, args=(settings, folder, inbox, theirs), kwargs=options, daemon=True)
    process.start()
    theirs.close()
    read_from(ours, receive)
    try:
        yield inbox.put
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


def _serve(settings: ServerSettings, folder: Path, inbox: Any, outbox: Connection, **options: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # are for the server, which closes the door
    Thread(target=_end_with_the_server, daemon=True).start()
    serve_clients(settings, folder, inbox, outbox.send, **options)


def _end_with_the_server() -> None:
    if server := multiprocessing.parent_process():
        server.join()
        os._exit(1)
