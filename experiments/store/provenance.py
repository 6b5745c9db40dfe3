"""What every result carries - the command, the date, the versions - and how its file is written: whole or not at all."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "triton", "flash-attn-4", "numpy", "hydra-core")


def stamp(command: str) -> dict[str, Any]:
    """Command with this process's arguments, date and versions."""
    return {"command": f"{command} {arguments()}".rstrip(), "date": today(), "versions": versions()}


def commit() -> str | None:
    """The commit of this source tree, "+ changes" behind it if files differ from it; None outside a git checkout."""
    tree = Path(__file__).parents[2]
    with suppress(OSError, subprocess.CalledProcessError):
        head, changes = (
            subprocess.run(["git", *what], cwd=tree, check=True, capture_output=True, text=True).stdout.strip()
            for what in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
        return f"{head} + changes" if changes else head
    return None


def arguments(*but: str) -> str:
    """This process's arguments, without the options `but`: where results were written says nothing about them."""
    left_out = tuple(f"{key}=" for key in but or ("folder", "commit"))
    return shlex.join(_shortened(argument) for argument in sys.argv[1:] if not argument.startswith(left_out))


def _shortened(argument: str) -> str:
    """Of a path, its last two parts: where it lies on this machine is nobody's concern."""
    key, equals, value = argument.partition("=")
    parts = Path(value).parts
    return argument if len(parts) < 3 else f"{key}{equals}.../{'/'.join(parts[-2:])}"


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write at once, making the folder if need be; returns the path."""
    with at_once(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def partial_name(name: str) -> str:
    """What a file is called while `at_once` writes it, and for ever if the process is killed then."""
    return f".{name}"


@contextmanager
def at_once(path: Path) -> Iterator[Path]:
    """A file beside it, of the same suffix, to be written inside the `with`; it takes the path's place if nothing fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(partial_name(path.name))
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
