"""Records the provenance of results (command, date, versions), and writes result files atomically."""

import json
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

ROOT = Path(__file__).resolve().parents[2]  # root of the source tree

BENCH = "python -m experiments.bench"
PACKAGES = ("torch", "transformers", "triton", "flash-attn-4", "numpy", "hydra-core")


def provenance(command: str) -> dict[str, Any]:
    """Returns the command with this process's arguments, the date, the commit and the versions of packages."""
    origin = {"command": f"{command} {arguments()}".rstrip(), "date": today(), "commit": commit()}
    return {**origin, "versions": versions()}


@cache
def commit(tree: Path = ROOT) -> str | None:
    """Returns the commit of a source tree, followed by "+ changes" if tracked files other than results differ from it.

    Returns None for a copy without git, and for a tree that was installed inside another repository.
    """
    git = partial(subprocess.check_output, cwd=tree, stderr=subprocess.DEVNULL, text=True)
    with suppress(OSError, subprocess.CalledProcessError):
        root, head = git(["git", "rev-parse", "--show-toplevel", "HEAD"]).splitlines()
        if Path(root).resolve() != tree:
            return None
        changes = git(["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!reproduction/results"])
        return f"{head} + changes" if changes else head
    return None


def arguments() -> str:
    """Returns this process's arguments without the folder of the results, which does not affect the results."""
    folders = ("folder=", "--record=")
    return shlex.join(_shorten_path(argument) for argument in sys.argv[1:] if not argument.startswith(folders))


def _shorten_path(argument: str) -> str:
    """Keeps the last two parts of each path in a list of paths, since the rest is specific to this machine."""
    key, equals, value = argument.partition("=") if "=" in argument else ("", "", argument)
    paths = [(path, Path(path).parts) for path in value.split(",")]
    shown = [path if len(parts) < 3 else f".../{'/'.join(parts[-2:])}" for path, parts in paths]
    return f"{key}{equals}{','.join(shown)}"


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def now() -> str:
    """Returns the current time to the second, with its time zone."""
    return f"{datetime.now().astimezone():%Y-%m-%dT%H:%M:%S%z}"


@cache
def versions() -> dict[str, str]:
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Writes a file atomically, and creates its folder. Returns the path. NaN and infinity become null, since JSON has neither."""
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    return write_text(path, json.dumps(finite, indent=1) + "\n")


def write_text(path: Path, text: str) -> Path:
    """Writes a file atomically, and creates its folder. Returns the path."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a hidden path beside `path`, with the same suffix, to write to. The new file replaces `path` unless an error occurs.

    A killed process leaves the hidden file behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid4().hex}{path.suffix}")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # the disk may have failed
            partial.unlink()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the median, minimum, maximum and number of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "repeats": len(values)}


def write_benchmark(
    name: str, hardware: str, figures: dict[str, Any], folder: Path | str = "results", command: str = BENCH
) -> Path:
    """Writes a benchmark's figures, with their provenance, to `folder`/<hardware>/<name>.json. Returns the path."""
    content = {"benchmark": name, "hardware": hardware, **provenance(command), **figures}
    return write_json(Path(folder) / slug(hardware) / f"{name}.json", content)


def slug(hardware: str) -> str:
    """Returns the folder name for hardware: 'NVIDIA H200' -> h200; any CPU -> cpu."""
    gpu = re.search(r"(?:NVIDIA|GeForce|AMD)[ -]+(.+)", hardware)
    if gpu is None or "cores" in hardware:
        return "cpu"
    name = re.sub(r" \d+ ?GB.*?(?= x\d+$|$)", "", gpu.group(1))  # an H100 80GB HBM3 is h100, two are h100-x2
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
