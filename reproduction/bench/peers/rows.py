"""The figures of other engines for docs/performance.md: those that a command measured, and others entered by hand."""

import json
from pathlib import Path

from reproduction.bench.tables import Json, stamp

BY_HAND = ", by hand"
"""After the date of a figure that no command wrote."""


def read(folder: Path) -> Json:
    """`folder`/peers.json with the figures of `folder`/peers/*.json in the place of its own.

    Every engine's figure becomes {"median", "measured": date and commit}, with "min", "max", "repeats", "batch" and
    "budget" where a command measured it; each section gets "sources", the measured files that it holds.
    """
    path = folder / "peers.json"
    found: Json = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    measured = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / "peers").glob("*.json"))]
    names = {(tuple(file["section"]), file["row"]) for file in measured}
    for keys in (("trace",), ("one_request",), ("pd",), *(("decode", new) for new in found.get("decode", {}))):
        if section := _section(found, keys):
            _date(section, {row for at, row in names if at == keys}, f"{found['date']}{BY_HAND}")
    for file in measured:
        section = _section(found, tuple(file["section"]), create=True)
        setting = {key: file[key] for key in ("batch", "budget")}
        section.setdefault("engines", {})[file["row"]] = file["figures"]["value"] | setting | {"measured": stamp(file)}
        section.setdefault("seconds", {})[file["row"]] = file["figures"]["seconds"]["median"]
        section.setdefault("sources", []).append(file)
    return found


def _section(found: Json, keys: tuple[str, ...], *, create: bool = False) -> Json:
    for key in keys:
        found = found.setdefault(key, {}) if create else found.get(key, {})
    return found


def _date(section: Json, measured: set[str], date: str) -> None:
    """Drop the hand-entered figures that were measured since, and date the others."""
    for key in ("engines", "seconds", "active_share"):
        section[key] = {name: value for name, value in section.get(key, {}).items() if name not in measured}
    section["engines"] = {name: {"median": value, "measured": date} for name, value in section["engines"].items()}
