"""Results of a comparison with the paper: stamped with the command, the date, the versions and the profiles."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.bench.report import versions


def write(name: str, figures: Mapping[str, Any], simulated_on: Mapping[str, Any], folder: Path) -> Path:
    """Write `folder`/paper/<name>.json; return the path.

    simulated_on: the `provenance` of each cost model.
    """
    stamped = {
        "command": f"python -m experiments.paper {' '.join(map(_shortened, sys.argv[1:]))}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": versions(),
        "simulated_on": simulated_on,
        **figures,
    }
    path = folder / "paper" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(stamped, indent=1) + "\n")
    partial.replace(path)
    return path


def _shortened(option: str) -> str:
    """Of a path, its last two parts: where it lies on this machine is nobody's concern."""
    key, equals, value = option.partition("=")
    parts = Path(value).parts
    return option if len(parts) < 3 else f"{key}{equals}.../{'/'.join(parts[-2:])}"
