"""Verdicts as text, and results files with command, date, versions and where the times come from."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from experiments.store.provenance import provenance, write_json
from reproduction.papers.claims import Outcome, Verdict


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
            verdict.outcome,
            verdict.claim.note,
        )
        for verdict in verdicts
    ]
    names = [name.replace("_", " ") for name in columns]
    return tabulate(rows, ("claim", "where", "on", "asked", "ours", *names, "outcome", "note"), disable_numparse=True)


def conclusion(verdicts: Sequence[Verdict]) -> str:
    """Each outcome's number among the independent claims, and how many follow from inputs or from other claims."""
    count = Counter(verdict.outcome for verdict in verdicts)
    tested = sum(count[outcome] for outcome in TESTED)
    lists = [[f"{count[key]} {words}" for key, words in names.items() if count[key]] for names in (TESTED, NOT_TESTED)]
    parts = [", ".join(each) for each in lists]
    return "; ".join(filter(None, [f"{tested} independent claims tested: {parts[0]}", parts[1]]))


TESTED: Mapping[Outcome, str] = {
    "held": "held",
    "same direction": "in the same direction but not reproduced",
    "missed": "missed",
}
NOT_TESTED: dict[Outcome, str] = {"not comparable": "not comparable", "derived": "derived from inputs or other claims"}
SETTLED: tuple[Outcome, ...] = ("held", "derived")
"""Outcomes that need no reason."""


def write(name: str, figures: Mapping[str, Any], machines: Mapping[str, Any], folder: Path | str) -> Path:
    """Write `folder`/paper/<name>.json; return the path.

    machines: the `provenance` of each machine or cost model.
    """
    stamped = {**provenance("python -m reproduction.papers"), "machines": machines, **figures}
    return write_json(Path(folder) / "paper" / f"{name}.json", stamped)
