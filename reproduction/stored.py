"""Results files of benchmarks, as they are stored in reproduction/results."""

from pathlib import Path
from typing import Any

from experiments.store.provenance import write_benchmark
from reproduction import RESULTS

BENCH = "python -m reproduction.bench"
VALIDATION = "python -m reproduction.validation"


def write(
    name: str, hardware: str, figures: dict[str, Any], folder: Path | str = RESULTS, command: str = BENCH
) -> Path:
    """Writes one benchmark's figures, with their provenance, to `folder`/<hardware>/<name>.json; returns the path."""
    return write_benchmark(name, hardware, figures, folder, command)
