"""Verdicts as text, and results stamped with the command, the date, the versions and where the times come from."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tabulate import tabulate

from experiments.bench.report import versions
from experiments.paper.claims import Verdict


def table(verdicts: Sequence[Verdict]) -> str:
    """A line a verdict."""
    columns = sorted({name for verdict in verdicts for name in verdict.extra})
    rows = [
        (
            verdict.claim.id,
            verdict.claim.where,
            verdict.claim.hardware,
            verdict.claim.asked,
            f"{verdict.value:.3f}",
            *(f"{verdict.extra[name]:.3f}" if name in verdict.extra else "" for name in columns),
            ("yes" if verdict.holds else "no") + ("" if verdict.claim.tested else " (not tested)"),
            verdict.claim.note,
        )
        for verdict in verdicts
    ]
    names = [name.replace("_", " ") for name in columns]
    return tabulate(rows, ("claim", "where", "on", "asked", "ours", *names, "holds", "note"), disable_numparse=True)


def conclusion(verdicts: Sequence[Verdict]) -> str:
    """How many hold of those that are tested, and of the others, which are known to fail, how many there are."""
    tested = [verdict for verdict in verdicts if verdict.claim.tested]
    held = sum(verdict.holds for verdict in tested)
    others = len(verdicts) - len(tested)
    return f"{held} of {len(tested)} tested claims hold" + (
        f"; {others} are not tested, their notes say why" if others else ""
    )


def write(name: str, figures: Mapping[str, Any], machines: Mapping[str, Any], folder: Path) -> Path:
    """Write `folder`/paper/<name>.json; return the path.

    machines: the `provenance` of each machine or cost model.
    """
    stamped = {
        "command": f"python -m experiments.paper {' '.join(_shown(sys.argv[1:]))}".rstrip(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": versions(),
        "machines": machines,
        **figures,
    }
    path = folder / "paper" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(stamped, indent=1) + "\n")
    partial.replace(path)
    return path


def _shown(options: Sequence[str]) -> list[str]:
    """Of a path, its last two parts, and nothing of where the results went: neither says anything about them."""
    return [_shortened(option) for option in options if not option.startswith("folder=")]


def _shortened(option: str) -> str:
    key, equals, value = option.partition("=")
    parts = Path(value).parts
    return option if len(parts) < 3 else f"{key}{equals}.../{'/'.join(parts[-2:])}"
