"""Markdown tables of speeds: ours and other engines', as multiples of the fastest other engine's."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from tabulate import tabulate

MISSING = "not measured"

Json = dict[str, Any]


class Row(NamedTuple):
    """One way to do a piece of work.

    figures: its speed or its time, by the table's unit: "median", and "min" and "max" if repeated; "measured", see
        `stamp`. None: not measured.
    share: of the time, in which the device computes; None: not known.
    """

    name: str
    figures: Json | None
    share: float | None = None

    @property
    def value(self) -> float | None:
        return None if self.figures is None else float(self.figures["median"])

    @property
    def measured(self) -> str:
        """Date and commit of the run."""
        return str((self.figures or {}).get("measured", ""))

    @property
    def spread(self) -> str:
        """Least to greatest of several runs; empty for one."""
        found = self.figures or {}
        return f"{number(found['min'])} to {number(found['max'])}" if found.get("repeats", 1) > 1 else ""


def speeds(theirs: list[Row], ours: list[Row], unit: str, *, at_copy_speed: float | None, faster_is_less: bool) -> str:
    """All rows, their speed over the fastest of `theirs` and, if `at_copy_speed` is known, over that."""
    rows = [*theirs, *ours]
    head = ["", unit]
    columns = [[row.name for row in rows], [number(row.value) for row in rows]]

    def relative(value: float | None, against: float) -> float | None:
        return None if value is None else against / value if faster_is_less else value / against

    if any(row.spread for row in rows):
        head.append("least to greatest")
        columns.append([row.spread for row in rows])
    if best := fastest(theirs, faster_is_less=faster_is_less):
        head.append(f"speed over {best.name}")
        columns.append([_formatted(relative(row.value, best.value or 0.0), "{:.3f}") for row in rows])
    if at_copy_speed:
        head.append(f"of copy speed, {at_copy_speed}")
        columns.append([_formatted(relative(row.value, at_copy_speed), "{:.1%}") for row in rows])
    if any(row.share is not None for row in rows):
        head.append("device active")
        columns.append([_formatted(row.share, "{:.2%}", "") for row in rows])
    if any(row.measured for row in rows):
        head.append("measured")
        columns.append([row.measured for row in rows])
    return markdown(zip(*columns, strict=True), head)


def fastest(rows: Iterable[Row], *, faster_is_less: bool = False) -> Row | None:
    """The fastest of the rows that were measured, or None."""
    known = [row for row in rows if row.value is not None]
    return (min if faster_is_less else max)(known, key=lambda row: row.value or 0.0, default=None)


def markdown(rows: Iterable[Iterable[Any]], head: list[str]) -> str:
    aligned = ("left", *["right"] * (len(head) - 1))
    return tabulate(list(rows), head, tablefmt="github", colalign=aligned, disable_numparse=True)


def stamp(file: Json) -> str:
    """Date and commit of the run that wrote a results file."""
    commit, space, changes = (file.get("commit") or "").partition(" ")
    return f"{file['date']}, {commit[:12] or 'commit not recorded'}{space}{changes}"


def source(file: Json) -> str:
    """How a results file was measured: command, card, date, commit and versions."""
    card = file["hardware"] + (f", driver {file['driver']}" if "driver" in file else "")
    packages = ", ".join(f"{name} {version}" for name, version in file["versions"].items())
    return f"`{file['command']}`; {card}; {stamp(file)}; {packages}"


def number(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _formatted(value: float | None, form: str, missing: str = "-") -> str:
    return missing if value is None else form.format(value)
