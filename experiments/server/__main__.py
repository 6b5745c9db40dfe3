"""`python -m experiments.server key=value ...`: an OpenAI-compatible server. `--help` lists all keys.

SIGTERM or Ctrl-C ends it: open requests go on for `drain_seconds`, or until a second signal, then the folder of the run is written.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn

from cbatch import ConfigError
from experiments.job import Command
from experiments.run import main
from experiments.server.app import make_app
from experiments.server.door import Door
from experiments.server.link import engine_of
from experiments.server.settings import ServerSettings, read_server_settings
from experiments.store.claim import TerminatedError

_KEEP_ALIVE = 60
"""Seconds that an idle connection stays open: a client that sends again after its end would meet a closed one."""

_LAST_SECONDS = 1
"""After the end of the drain: for clients to be told, those that read nothing excepted."""


def serve_http(
    settings: ServerSettings,
    folder: Path,
    *,
    replace: bool = False,
    say: Callable[[str], None] = print,
    bar: bool = True,
) -> dict[str, Any]:
    """Serves clients until a signal ends it, and writes the folder of the run; returns its figures.

    Raises CbatchError: as `serve`; the port is in use; the engine has failed.
    """
    with socket.socket(socket.AF_INET6 if ":" in settings.bind else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.bind, settings.port))
        except OSError as error:
            place = f"bind={settings.bind} port={settings.port}"
            raise ConfigError(f"{place}: {error.strerror or error}; give another one") from None
        fastest = uvicorn.Config("", log_level="critical").get_loop_factory()
        with asyncio.Runner(loop_factory=fastest) as runner:
            try:
                return runner.run(_serve(settings, folder, listener, say, replace=replace))
            except asyncio.CancelledError:
                raise TerminatedError("terminated") from None


async def _serve(
    settings: ServerSettings, folder: Path, listener: socket.socket, say: Callable[[str], None], **options: Any
) -> dict[str, Any]:
    door = Door(settings)
    loop, cancel = asyncio.get_running_loop(), cast(asyncio.Task[Any], asyncio.current_task()).cancel
    # until it serves: an exception of a signal's handler would be lost in the event loop
    signal.signal(signal.SIGTERM, lambda *_: door.ready.done() or loop.call_soon_threadsafe(cancel))
    with engine_of(settings, folder, door.receive, say=say, **options) as door.put:
        first: list[asyncio.Future[Any]] = [door.ready, door.closed]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if door.ready.done():
            address = f"http://{settings.bind}:{listener.getsockname()[1]}"
            line = f"serving {settings.model.name} on {address}; SIGTERM or Ctrl-C ends it"
            web = _Web(door, partial(say, line))
            door.closed.add_done_callback(web.end)
            listener.listen(web.config.backlog)
            await web.serve([listener])
            door.put(None)
        return await door.closed


class _Web(uvicorn.Server):
    """Ends at a signal without raising it again: what follows it is the end of the run."""

    def __init__(self, door: Door, say: Callable[[], None]) -> None:
        """say: called when it serves."""
        self._door, self._say, self._seconds = door, say, door.settings.drain_seconds
        options: Any = {"timeout_graceful_shutdown": self._seconds + _LAST_SECONDS, "lifespan": "off", "ws": "none"}
        quiet: Any = {"log_level": "critical", "access_log": False, "server_header": False}
        super().__init__(uvicorn.Config(make_app(door), timeout_keep_alive=_KEEP_ALIVE, **options, **quiet))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._say()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._door.ready.get_loop().call_soon_threadsafe(self.end)

    def end(self, *_: object) -> None:
        """Takes no further requests, and cuts those that are open after `drain_seconds`, or when called a second time."""
        if self.should_exit:
            self._door.cut()
        self.should_exit = True
        self._door.ready.get_loop().call_later(self._seconds, self._door.cut)


COMMAND = Command(
    "server",
    read_server_settings,
    serve_http,
    read_finished=lambda folder, identity: None,  # a finished folder is refused: clients wait for a server
    stem="_server",
    lacks=("slo:", "workload: ", "workload/", "experiment: "),
)

if __name__ == "__main__":
    sys.exit(main(COMMAND))
