"""The figures of other engines for docs/performance.md: those that a command measured, and others entered by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BY_HAND = " (by hand)"
"""After the name of an engine whose figure no command wrote."""

Json = dict[str, Any]


def read(folder: Path) -> Json:
    """`folder`/peers.json with the figures of `folder`/peers/*.json in the place of its own.

    Every engine's figure becomes {"median": ...}, with "min", "max" and "repeats" where it was measured; each section gets
    "sources", the measured files that it holds.
    """
    path = folder / "peers.json"
    found: Json = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    measured = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / "peers").glob("*.json"))]
    names = {(tuple(file["section"]), file["row"]) for file in measured}
    for keys in (("trace",), ("one_request",), ("pd",), *(("decode", new) for new in found.get("decode", {}))):
        if section := _section(found, keys):
            _mark(section, {row for at, row in names if at == keys})
    for file in measured:
        section = _section(found, tuple(file["section"]), create=True)
        section.setdefault("engines", {})[file["row"]] = file["figures"]["value"]
        section.setdefault("seconds", {})[file["row"]] = file["figures"]["seconds"]["median"]
        section.setdefault("sources", []).append(file)
    return found


def source(file: Json) -> str:
    """How a measured figure came about."""
    commit = f"commit {file['commit'][:12]}" if file["commit"] else "commit unknown"
    return (
        f"`{file['command']}`; {file['hardware']}, driver {file['driver']}; {file['date']}; {commit}; {packages(file)}"
    )


def packages(file: Json) -> str:
    return ", ".join(f"{name} {version}" for name, version in file["versions"].items())


def _section(found: Json, keys: tuple[str, ...], *, create: bool = False) -> Json:
    for key in keys:
        found = found.setdefault(key, {}) if create else found.get(key, {})
    return found


def _mark(section: Json, measured: set[str]) -> None:
    """Drop the hand-entered figures that were measured since, and mark the others."""
    for key in ("engines", "seconds", "active_share"):
        kept = {name: value for name, value in section.get(key, {}).items() if name not in measured}
        section[key] = {name + BY_HAND: value for name, value in kept.items()}
    section["engines"] = {name: {"median": value} for name, value in section["engines"].items()}
