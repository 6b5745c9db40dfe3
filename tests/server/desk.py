"""A door without an engine, and without HTTP."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, cast

from cbatch import FinishReason, Request
from experiments.server.answers import Answer
from experiments.server.bodies import AnyBody, CompletionBody
from experiments.server.clients import Turn
from experiments.server.door import Door
from experiments.server.settings import read_server_settings
from experiments.settings.compose import compose

HELLO = {"messages": [{"role": "user", "content": "a b"}]}
CACHED = 5


class Desk:
    """A door whose engine the test plays. sent: messages to the engine."""

    def __init__(self, *arguments: str, recv: Callable[[], Any] = lambda: 100) -> None:
        settings = read_server_settings(compose("policy=orca", "backend=sim", "seed=7", *arguments, name="server"))
        self.sent: list[Any] = []
        self.door = Door(settings, cast(Connection, SimpleNamespace(send=self.sent.append, recv=recv)))

    def open(self, kind: type[AnyBody] = CompletionBody, **fields: Any) -> Awaitable[Answer]:
        asked = {"prompt": [1, 2]} if kind is CompletionBody else HELLO
        return self.door.open(kind, json.dumps({**asked, **fields}).encode())

    def tell(self, tokens: Mapping[int, int], **ends: FinishReason) -> None:
        """Ends requests "r0" and so on."""
        ended = [Request.from_spec(next(spec for spec in self.sent if spec.id == int(name[1:]))) for name in ends]
        for request, reason in zip(ended, ends.values(), strict=True):
            request.finish_reason, request.num_cached_tokens = reason, CACHED
        self.door.deliver(Turn([*tokens], [*tokens.values()], ended, (0, 0, 0.0)))


async def read(answer: Answer, *news: Callable[[], object], leaves: bool = False) -> list[dict[str, Any]]:
    """Returns what is sent to a client while it is told the news, one at a time. leaves: the client does, after them."""
    sent, has_left = list[dict[str, Any]](), asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        assert message["type"] == f"http.response.{'body' if sent else 'start'}"
        sent.append(message)

    async def receive() -> dict[str, str]:
        await has_left.wait()
        return {"type": "http.disconnect"}

    answering = asyncio.create_task(answer({}, receive, send))
    for tell in news:
        for _ in range(5):
            await asyncio.sleep(0)
        tell()
    if leaves:
        has_left.set()
    await asyncio.wait_for(answering, 5)
    return sent
