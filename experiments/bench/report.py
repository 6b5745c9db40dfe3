"""What every benchmark result carries: the command, the date, the versions and the hardware it was measured on."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "triton", "flash-attn-4", "numpy", "hydra-core")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "repeats": len(values)}


def write(
    name: str,
    hardware: str,
    figures: dict[str, Any],
    folder: Path = Path("results"),
    command: str = "python -m experiments.bench",
) -> Path:
    """Write one benchmark's figures, stamped, to `folder`/<hardware>/<name>.json; return the path."""
    stamped = {
        "benchmark": name,
        "command": f"{command} {shlex.join(_without_folder(sys.argv[1:]))}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": hardware,
        "versions": versions(),
        **figures,
    }
    path = folder / slug(hardware) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(stamped, indent=1) + "\n")
    partial.replace(path)
    return path


def _without_folder(arguments: Sequence[str]) -> list[str]:
    """Where the results were written says nothing about them."""
    return [argument for argument in arguments if not argument.startswith("folder=")]


def cpu_name() -> str:
    """The processor's own name and the cores at hand."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    return f"{found.group(1) if found else platform.machine()}, {cores} cores"


def slug(hardware: str) -> str:
    """A folder name: 'NVIDIA H200' -> h200; any CPU -> cpu."""
    gpu = re.search(r"(?:NVIDIA|GeForce|AMD)[ -]+(.+)", hardware)
    if gpu is None or "cores" in hardware:
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", gpu.group(1).lower()).strip("-")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
