"""What benchmarks have measured on a GPU, for the figures that cannot be simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

FOLDER = Path(__file__).parents[2] / "results" / "h200"
STAMP = ("benchmark", "command", "date", "hardware", "versions")


def measured(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """The results file of `python -m experiments.bench NAME`; None where it was not run."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def stamped(data: pd.DataFrame, *found: dict[str, Any]) -> pd.DataFrame:
    """`data` with what the files say of themselves, which goes into the figure's own: command, date, hardware and versions."""
    data.attrs["measured"] = [{key: file[key] for key in STAMP if key in file} for file in found]
    return data


def left_out(name: str) -> str:
    """What a figure says that has nothing to draw."""
    return f"left out; run python -m experiments.bench {name} on a GPU"
