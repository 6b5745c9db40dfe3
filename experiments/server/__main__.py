"""`python -m experiments.server key=value ...`: an OpenAI-compatible server. `--help` lists all keys.

SIGTERM or Ctrl-C ends it: open requests go on for `drain_seconds`, or until a second signal, then the folder of the run is written.
A third signal ends a plan that does not return.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from math import ceil
from multiprocessing import active_children
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch import ConfigError
from cbatch.errors import check_installed
from experiments.job import Command
from experiments.run import main
from experiments.server.engine import Log, engine_of
from experiments.server.settings import ServerSettings, read_server_settings

if TYPE_CHECKING:
    from uvicorn import Server

    from experiments.server.door import Door


def serve_http(settings: ServerSettings, folder: Path, *, log: Log = print, **options: Any) -> dict[str, Any]:
    """Serves clients until a signal ends it, and writes the folder of the run; returns its figures. options: as for `serve`.

    Raises CbatchError: as `serve`; the port is in use; the engine has failed.
    """
    check_installed("server", "prometheus_client", "starlette", "uvicorn")
    import uvicorn

    from experiments.server.app import Http, make_app
    from experiments.server.door import Door

    bind, port = settings.server.bind, settings.server.port
    try:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        both = bind == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((bind, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(f"bind={bind} port={port}: {error.strerror or error}; give another one") from None
    with listener, engine_of(settings, folder, log=log, **options) as engine:
        door = Door(settings, engine)
        config = uvicorn.Config(
            make_app(door),
            http=Http,
            lifespan="off",
            ws="none",
            timeout_keep_alive=60,  # a client that sends again after a pause would meet a closed connection
            timeout_graceful_shutdown=ceil(settings.server.drain_seconds) + 1,  # of clients that read nothing
            log_level="critical",
            access_log=False,
            server_header=False,
        )

        class Web(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                """Leaves signals to `_serve`: uvicorn would stop serving at the second, and raise each again at its end."""
                yield

        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            return runner.run(_serve(door, Web(config), listener, log))


async def _serve(door: "Door", web: "Server", listener: socket.socket, log: Log) -> dict[str, Any]:
    settings, loop, calls = door.settings, asyncio.get_running_loop(), count()

    def end(*_: object) -> None:
        """On the first call drains; on the second cuts open requests; on the third aborts a running plan."""
        number = next(calls)
        loop.call_later(0 if number else settings.server.drain_seconds, door.put, None)
        for engine in active_children() if number > 1 and not closed.done() else ():
            os.kill(engine.pid or 0, signal.SIGUSR1)
        web.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    closed = asyncio.create_task(door.listen())
    closed.add_done_callback(end)
    bind = settings.server.bind
    place = f"http://{f'[{bind}]' if ':' in bind else bind}:{listener.getsockname()[1]}"
    log(f"serving {settings.model.name} on {place}; stop it with Ctrl-C or SIGTERM")
    await web.serve([listener])
    door.put(None)
    figures = await closed
    if settings.backend.simulated:
        log(f"time_scale={figures['about']['chosen']['time_scale']}")
    return figures


COMMAND = Command(
    "server",
    read_server_settings,
    serve_http,
    result="",  # a finished folder is refused: clients wait for a server
    hidden_groups=("slo:", "workload: ", "workload/", "experiment: "),
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], COMMAND))
