"""A server in this process: its engine is a thread, and its application is asked without sockets."""

import asyncio
import json
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from commands import PATIENCE

from experiments.server.app import make_app
from experiments.server.clients import Inbox
from experiments.server.door import Door
from experiments.server.engine import serve_clients
from experiments.server.settings import ServerSettings, read_server_settings
from experiments.settings.compose import compose

T = TypeVar("T")


@dataclass
class Answered:
    """What a client has received."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def content(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """The objects of a stream."""
        *parts, last = self.text.split("data: ")[1:]
        assert last == "[DONE]\n\n"
        return [json.loads(part) for part in parts]


class InThread:
    """A server that runs. summary: of its run, once it has ended."""

    def __init__(self, runner: asyncio.Runner, door: Door) -> None:
        self._runner, self._door, self._app = runner, door, make_app(door)
        self._closed = runner.get_loop().create_task(door.listen())
        self.summary: dict[str, Any] = {}

    def close(self) -> None:
        self._door.put(None)
        self.summary = self._run(asyncio.shield(self._closed))

    def _run(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await asyncio.wait_for(work, PATIENCE)

        return self._runner.run(wait())

    def ask(self, path: str, body: Any = None, **headers: str) -> Answered:
        """Sends a request, POST if it has a body: bytes, or what becomes JSON."""
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"Content-Type": "application/json", **headers}
        scope = {
            "type": "http",
            "method": "POST" if body is not None else "GET",
            "path": path,
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
        }
        received, incoming = list[dict[str, Any]](), [{"type": "http.request", "body": content}]

        async def receive() -> dict[str, Any]:
            return incoming.pop() if incoming else await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: dict[str, Any]) -> None:
            received.append(message)

        self._run(self._app(scope, receive, send))  # type: ignore[arg-type]
        head, *parts = received
        names = {name.decode(): value.decode() for name, value in head["headers"]}
        return Answered(head["status"], names, b"".join(part.get("body", b"") for part in parts).decode())


@contextmanager
def engine_in_thread(settings: ServerSettings, folder: Path, **options: Any) -> Iterator[Connection]:
    """Runs an engine as `engine_of`, in a thread, which is faster."""
    inbox, outbox = Inbox(), SimpleQueue[Any]()
    engine = Thread(target=serve_clients, args=(settings, folder, inbox, outbox.put), kwargs=options, daemon=True)
    engine.start()
    try:
        yield cast(Connection, SimpleNamespace(send=inbox.put, recv=outbox.get))
    finally:
        inbox.put(None)
        engine.join(PATIENCE)


@contextmanager
def in_thread(folder: Path, *arguments: str) -> Iterator[InThread]:
    """Runs a server inside the `with`. Raises CbatchError if it does not start."""
    settings = read_server_settings(compose(*arguments, name="server"))
    with engine_in_thread(settings, folder) as engine, asyncio.Runner() as runner:
        server = InThread(runner, Door(settings, engine))
        try:
            yield server
        finally:
            server.close()
