"""Where the engine of a server runs: in a thread of this process, or in a process of its own.

A thread that waits for a GPU is late by milliseconds where another thread is busy in Python; a process is not.
"""

import asyncio
import multiprocessing
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from experiments.server.engine import Message, Send, serve_clients
from experiments.server.settings import ServerSettings

Put = Callable[[Message], object]

_SWITCH_SECONDS = 5e-5
"""After which a thread that computes gives way: the engine wakes late by as much."""


def start_engine(settings: ServerSettings, folder: Path, receive: Send, **options: Any) -> Put:
    """Starts the engine; returns what puts a message into its inbox. receive: called in the running event loop with each of its messages."""
    loop = asyncio.get_running_loop()
    if settings.in_a_process:
        return _start_process(loop, settings, folder, receive, **options)
    sys.setswitchinterval(_SWITCH_SECONDS)
    inbox = SimpleQueue[Message]()

    def send(message: Any) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(receive, message)

    arguments = (settings, folder, inbox, send)
    Thread(target=serve_clients, args=arguments, kwargs=options, name="engine", daemon=True).start()
    return inbox.put


def _start_process(
    loop: asyncio.AbstractEventLoop, settings: ServerSettings, folder: Path, receive: Send, **options: Any
) -> Put:
    context = multiprocessing.get_context("spawn")  # a fork has neither threads nor CUDA
    inbox, (ours, theirs) = context.Queue(), context.Pipe()
    process = context.Process(target=_serve, args=(settings, folder, inbox, theirs), kwargs=options, daemon=True)
    process.start()
    theirs.close()

    def read() -> None:
        try:
            message = ours.recv()
        except (EOFError, OSError):
            loop.remove_reader(ours.fileno())
            message = "the engine's process has ended"
        receive(message)

    loop.add_reader(ours.fileno(), read)
    return inbox.put


def _serve(settings: ServerSettings, folder: Path, inbox: Any, outbox: Connection, **options: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # are for the server, which closes the door
    serve_clients(settings, folder, inbox, outbox.send, **options)
