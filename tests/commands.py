"""Runs the repository's commands as a user would: in a process of their own, in a folder of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

QUICK = ("workload.num_requests=20", "workload.length=256")
"""A simulated run of a few milliseconds."""


def environment() -> dict[str, str]:
    """This process's environment, with the repository and the working folder importable, and few threads."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command(module: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m experiments.MODULE ARGUMENTS`, to its end."""
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{module}", *arguments],
        cwd=cwd,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())  # type: ignore[no-any-return]


def write_azure_trace(path: Path, num_requests: int = 30) -> Path:
    """A small file in the format of the Azure LLM inference trace of 2023, a request every 50 ms."""
    lines = [
        f"2023-11-16 18:15:{46 + index * 0.05:010.7f},{100 + 37 * index % 400},{5 + 11 * index % 40}"
        for index in range(num_requests)
    ]
    path.write_text("\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]))
    return path
