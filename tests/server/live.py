"""A server in a process of its own, and plain HTTP to it."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from commands import PATIENCE, environment

QUICK = ("policy=sarathi_serve", "backend=sim", "time_scale=20", "batch=64", "port=0")
"""A simulated server that answers at once."""


class Live:
    """A server that runs. folder: of its run, complete once it has ended."""

    def __init__(self, process: "subprocess.Popen[str]", port: int, folder: Path) -> None:
        self.process, self.port, self.folder = process, port, folder

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

    def stop(self) -> tuple[int, str]:
        """Ends the server; returns its status, and what it printed since it served."""
        self.process.send_signal(signal.SIGTERM)
        printed, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, printed


@contextmanager
def serving(cwd: Path, *arguments: str) -> Iterator[Live]:
    """Runs a server inside the `with`."""
    command = [sys.executable, "-m", "experiments.server", *arguments, "output=run"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=cwd, env=environment(), text=True, **pipes) as process:
        printed = ""
        assert process.stdout is not None
        try:
            while not (address := re.search(r"serving .* on http://\S+:(\d+)", printed)):
                line = process.stdout.readline()
                assert line, printed
                printed += line
            yield Live(process, int(address[1]), cwd / "run")
        finally:
            process.kill()


def events(answer: HTTPResponse) -> list[Any]:
    """Returns the chunks of a streamed answer, to its end."""
    return [json.loads(part) for part in answer.read().decode().split("data: ")[1:] if part.strip() != "[DONE]"]
