"""`python -m experiments.server key=value ...`: an OpenAI-compatible server. `--help` lists all keys.

SIGTERM or Ctrl-C ends it: open requests go on for `drain_seconds`, or until a second signal, then the folder of the run is written.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
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

_QUIET: Any = {"lifespan": "off", "ws": "none", "log_level": "critical", "access_log": False, "server_header": False}

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
            limits: Any = {"timeout_graceful_shutdown": seconds + _LAST_SECONDS, "timeout_keep_alive": _KEEP_ALIVE}
            web = _Web(uvicorn.Config(make_app(door), **limits, **_QUIET))

            def end(*_: object) -> None:
                """Takes no further requests, and cuts those that are open after a while, or when called a second time."""
                if web.should_exit:
                    door.cut()
                web.should_exit = True
                loop.call_later(seconds, door.cut)

            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, end)
            door.closed.add_done_callback(end)
            listener.listen(web.config.backlog)
            address = f"http://{settings.server.bind}:{listener.getsockname()[1]}"
            say(f"serving {settings.model.name} on {address}; SIGTERM or Ctrl-C ends it")
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
