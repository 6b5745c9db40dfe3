"""A server in this process: its engine is a thread, and its application is asked without sockets."""

import asyncio
import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from commands import PATIENCE

from cbatch import CbatchError
from experiments.server.app import make_app
from experiments.server.door import Door
from experiments.server.engine import Inbox, serve_clients
from experiments.server.settings import ServerSettings, read_server_settings
from experiments.settings.compose import compose

T = TypeVar("T")


@dataclass
class Answered:
    """What a client has received. is_whole: the answer ended as it should; else the connection was cut, or the client left."""

    status: int
    headers: dict[str, str]
    text: str
    is_whole: bool

    @property
    def content(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """The objects of a stream."""
        parts = self.text.split("data: ")[1:]
        assert not self.is_whole or parts[-1] == "[DONE]\n\n"
        return [json.loads(part) for part in parts if part != "[DONE]\n\n"]


class InThread:
    """A server that runs. summary, problem: of its run, once it has ended."""

    def __init__(self, runner: asyncio.Runner, door: Door) -> None:
        self._runner, self.door, self._app = runner, door, make_app(door)
        self.closed = runner.get_loop().create_task(door.listen())
        self.summary: dict[str, Any] = {}
        self.problem = ""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(work, PATIENCE))

    def ask(self, path: str, body: Any = None, **headers: str) -> Answered:
        return self.run(self.call(path, body, **headers))

    async def call(self, path: str, body: Any = None, leave_after: int = -1, **headers: str) -> Answered:
        """Sends a request, POST if it has a body: bytes, or what becomes JSON. leave_after: so many parts of the answer."""
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"Content-Type": "application/json", **headers}
        scope = {
            "type": "http",
            "method": "POST" if body is not None else "GET",
            "path": path,
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
        }
        received: list[dict[str, Any]] = []
        incoming, has_left = [{"type": "http.request", "body": content}], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not incoming:
                await has_left.wait()
            return incoming.pop() if incoming else {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            received.append(message)
            if len(received) - 1 == leave_after:
                has_left.set()

        await self._app(scope, receive, send)
        head, *parts = received
        names = {name.decode(): value.decode() for name, value in head["headers"]}
        text = b"".join(part.get("body", b"") for part in parts).decode()
        return Answered(head["status"], names, text, not parts[-1].get("more_body"))

    def figures(self) -> dict[str, float]:
        return figures_of(self.ask("/metrics").text)


def figures_of(text: str) -> dict[str, float]:
    """Returns what `/metrics` shows, by name."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line[0] != "#")
    return {name.removeprefix("cbatch:"): float(value) for name, _, value in lines}


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
            server.door.put(None)
            try:
                server.summary = server.run(_result(server.closed))
            except CbatchError as error:
                server.problem = str(error)


async def _result(task: asyncio.Task[T]) -> T:
    return await task
