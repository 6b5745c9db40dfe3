"""`python -m experiments.server key=value ...`: an OpenAI-compatible server. `--help` lists all keys.

SIGTERM or Ctrl-C ends it: open requests go on for `drain_seconds`, then the folder of the run is written.
"""

import asyncio
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from cbatch import ConfigError
from experiments.job import Command
from experiments.run import main
from experiments.server.app import make_app
from experiments.server.door import Door
from experiments.server.settings import ServerSettings, read_server_settings

_KEEP_ALIVE = 60
"""Seconds that an idle connection stays open: a client that sends again after its end would meet a closed one."""


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
            return runner.run(_serve(settings, folder, listener, say, replace=replace))


async def _serve(
    settings: ServerSettings, folder: Path, listener: socket.socket, say: Callable[[str], None], **options: Any
) -> dict[str, Any]:
    door = Door(settings)
    door.start(folder, say=say, **options)
    first: list[asyncio.Future[Any]] = [door.ready, door.closed]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if door.ready.done():
        config = uvicorn.Config(
            make_app(door),
            log_level="critical",
            access_log=False,
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=settings.drain_seconds,  # type: ignore[arg-type]
        )
        web = _Web(config)
        door.closed.add_done_callback(web.end)
        listener.listen(config.backlog)
        address = f"http://{settings.bind}:{listener.getsockname()[1]}"
        say(f"serving {settings.model.name} on {address}; SIGTERM or Ctrl-C ends it")
        await web.serve([listener])
        door.put(None)
    return await door.closed


class _Web(uvicorn.Server):
    """Ends at a signal without raising it again: what follows it is the end of the run."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.end()

    def end(self, *_: object) -> None:
        self.should_exit = True


COMMAND = Command(
    "server",
    read_server_settings,
    serve_http,
    stem="_server",
    lacks=("slo:", "workload: ", "workload/", "experiment: "),
)

if __name__ == "__main__":
    sys.exit(main(COMMAND))
