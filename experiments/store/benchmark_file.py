"""Results files of benchmarks, in a folder for each hardware."""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.store.provenance import provenance, write_json


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns median, minimum and maximum of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "repeats": len(values)}


BENCH = "python -m experiments.bench"


def write(
    name: str, hardware: str, figures: dict[str, Any], folder: Path | str = "results", command: str = BENCH
) -> Path:
    """Writes one benchmark's figures, with their provenance, to `folder`/<hardware>/<name>.json; returns the path."""
    content = {"benchmark": name, "hardware": hardware, **provenance(command), **figures}
    return write_json(Path(folder) / slug(hardware) / f"{name}.json", content)


def slug(hardware: str) -> str:
    """Returns the folder name of a hardware: 'NVIDIA H200' -> h200; any CPU -> cpu."""
    gpu = re.search(r"(?:NVIDIA|GeForce|AMD)[ -]+(.+)", hardware)
    if gpu is None or "cores" in hardware:
        return "cpu"
    name = re.sub(r" \d+ ?GB.*", "", gpu.group(1))  # an H100 80GB HBM3 is h100
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
