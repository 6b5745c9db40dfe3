"""A server over sockets, in this process or in one of its own, and plain HTTP to it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from commands import PATIENCE, environment
from in_thread import engine_in_thread

from experiments.server import __main__ as main
from experiments.server.settings import read_server_settings
from experiments.settings.compose import compose

T = TypeVar("T")
QUICK = ("policy=sarathi_serve", "backend=sim", "time_scale=20", "batch=64", "port=0")
"""A simulated server that answers at once."""

_ADDRESS = re.compile(r"serving .* on http://(?:[\w.]+|\[[\w:]+\]):(\d+)")


class Live:
    """A server that runs."""

    def __init__(self, port: int) -> None:
        self.port = port

    def send(self, path: str, body: Any = None, **headers: str) -> HTTPResponse:
        """Sends a request, POST if it has a body: bytes, or what becomes JSON. The answer's head has come."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        connection.request("GET" if body is None else "POST", path, content, headers)
        return connection.getresponse()

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Returns the status and the object of an answer."""
        with self.send(path, body, Connection="close", **headers) as answer:
            text = answer.read()
        return answer.status, json.loads(text) if text[:1] == b"{" else text.decode()


def served(folder: Path, clients: Callable[[Live], T], *arguments: str, ends: bool = False) -> tuple[dict[str, Any], T]:
    """Serves `clients`, in a thread; returns the figures of the run, and what they have returned. The engine is a thread, too.

    ends: clients end the server; else it ends after them.
    """
    settings = read_server_settings(compose(*arguments, name="server"))
    answers: list[Future[T]] = []

    def work(live: Live) -> T:
        is_over = False
        try:
            result = clients(live)
            is_over = ends
            return result
        finally:
            if not is_over:
                os.kill(os.getpid(), signal.SIGTERM)

    def log(line: str) -> None:
        if address := _ADDRESS.match(line):
            answers.append(pool.submit(work, Live(int(address[1]))))

    with ThreadPoolExecutor(1) as pool, patch.object(main, "engine_of", engine_in_thread):
        try:
            figures = main.serve_http(settings, folder, log=log)
        finally:
            [answer] = answers
            answer.result(PATIENCE)
    return figures, answer.result()


class Process(Live):
    """A server in a process of its own. folder: of its run, complete once it has ended."""

    def __init__(self, process: "subprocess.Popen[str]", port: int, folder: Path) -> None:
        super().__init__(port)
        self.process, self.folder = process, folder

    def stop(self) -> int:
        """Ends the server; returns its status."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=PATIENCE)
        return self.process.returncode


@contextmanager
def serving(cwd: Path, *arguments: str) -> Iterator[Process]:
    """Runs a server inside the `with`."""
    command = [sys.executable, "-m", "experiments.server", *arguments, "output=run"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=cwd, env=environment(), text=True, **pipes) as process:
        printed = ""
        assert process.stdout is not None
        try:
            while not (address := _ADDRESS.search(printed)):
                line = process.stdout.readline()
                assert line, printed
                printed += line
            yield Process(process, int(address[1]), cwd / "run")
        finally:
            process.kill()


def events(answer: HTTPResponse) -> list[Any]:
    """Returns the chunks of a streamed answer, to its end."""
    return [json.loads(part) for part in answer.read().decode().split("data: ")[1:] if part.strip() != "[DONE]"]
