"""Verdicts as text, and results files with command, date, versions and where the times come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from experiments.paper.claims import Verdict
from experiments.store.provenance import provenance, write_json


def table(verdicts: Sequence[Verdict]) -> str:
    """One line per verdict."""
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
    """How many of the tested claims hold, and how many are not tested because they are known to fail."""
    tested = [verdict for verdict in verdicts if verdict.claim.tested]
    held = sum(verdict.holds for verdict in tested)
    others = len(verdicts) - len(tested)
    suffix = f"; {others} are not tested, their notes say why" if others else ""
    return f"{held} of {len(tested)} tested claims hold{suffix}"


def write(name: str, figures: Mapping[str, Any], machines: Mapping[str, Any], folder: Path) -> Path:
    """Write `folder`/paper/<name>.json; return the path.

    machines: the `provenance` of each machine or cost model.
    """
    stamped = {**provenance("python -m experiments.paper"), "machines": machines, **figures}
    return write_json(folder / "paper" / f"{name}.json", stamped)
