"""`python -m experiments.server key=value ...`: an OpenAI-compatible server. `--help` lists all keys.

SIGTERM or Ctrl-C ends it: open requests go on for `drain_seconds`, or until a second signal, then the folder of the run is written.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from math import ceil
from pathlib import Path
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
    bind, port = settings.server.bind, settings.server.port
    with socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((bind, port))
        except OSError as error:
            raise ConfigError(f"bind={bind} port={port}: {error.strerror or error}; give another one") from None
        fastest = uvicorn.Config("", log_level="critical").get_loop_factory()
        with asyncio.Runner(loop_factory=fastest) as runner:
            try:
                return runner.run(_serve(settings, folder, listener, say, replace))
            except asyncio.CancelledError:
                raise TerminatedError("terminated") from None


async def _serve(
    settings: ServerSettings, folder: Path, listener: socket.socket, say: Callable[[str], None], replace: bool
) -> dict[str, Any]:
    door, loop, seconds = Door(settings), asyncio.get_running_loop(), settings.server.drain_seconds
    loop.add_signal_handler(signal.SIGTERM, cast(asyncio.Task[Any], asyncio.current_task()).cancel)
    with engine_of(settings, folder, door.receive, say=say, replace=replace) as door.put:
        first: list[asyncio.Future[Any]] = [door.ready, door.closed]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if door.ready.done():
            quiet: Any = {"log_level": "critical", "access_log": False, "server_header": False}
            config = uvicorn.Config(
                make_app(door),
                lifespan="off",
                ws="none",
                timeout_keep_alive=60,  # a client that sends again after a pause would meet a closed connection
                timeout_graceful_shutdown=ceil(seconds) + 1,  # for clients to be told, those that read nothing excepted
                **quiet,
            )
            web = _Web(config)

            def end(*_: object) -> None:
                """Takes no further requests, and cuts those that are open after a while, or when called a second time."""
                if web.should_exit:
                    door.cut()
                web.should_exit = True
                loop.call_later(seconds, door.cut)

            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, end)
            door.closed.add_done_callback(end)
            listener.listen(config.backlog)
            place = f"http://{settings.server.bind}:{listener.getsockname()[1]}"
            say(f"serving {settings.model.name} on {place}; stop it with Ctrl-C or SIGTERM")
            await web.serve([listener])
            door.put(None)
        return await door.closed


class _Web(uvicorn.Server):
    """Leaves signals to others."""

    capture_signals = staticmethod(nullcontext)  # type: ignore[assignment]


COMMAND = Command(
    "server",
    read_server_settings,
    serve_http,
    result="",  # a finished folder is refused: clients wait for a server
    stem="_server",
    lacks=("slo:", "workload: ", "workload/", "experiment: "),
)

if __name__ == "__main__":
    sys.exit(main(COMMAND))
