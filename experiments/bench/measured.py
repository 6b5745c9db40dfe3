"""The results of one folder as the pages of figures need them: parts of a benchmark merged, peers beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from experiments.bench.peers import rows as peer_rows
from experiments.bench.tables import Json


class Measured(NamedTuple):
    """The files of one folder by name; one that is not there is empty."""

    peers: Json
    decode: Json
    graphs: Json
    pd: Json
    trace: Json
    attention: Json


def read(folder: Path) -> Measured:
    parts = {name: _merged(folder, name) for name in ("graphs", "pd")}
    attention = {found["model"]: found for path in sorted(folder.glob("attention-*.json")) if (found := _load(path))}
    return Measured(
        peers=peer_rows.read(folder),
        decode=_merged(folder, "async"),
        trace=_merged(folder, "trace", by="batch"),
        attention=attention,
        **parts,
    )


def _merged(folder: Path, benchmark: str, by: str = "") -> Json:
    """The files of a benchmark that may be measured part by part.

    The newest figure stands; of one date, `benchmark`.json's.

    Args:
        by: the setting that tells parts apart; names of figures begin with it.
    """
    paths = [folder / f"{benchmark}.json", *folder.glob(f"{benchmark}-*.json")]
    files = [found for path in reversed(paths) if (found := _load(path)).get("figures")]
    files.sort(key=lambda found: found["date"])
    merged: Json = {"sources": files, "figures": {}}
    for found in files:
        merged["hardware"] = found["hardware"]
        beginning = f"{by} {found[by]}, " if by else ""
        for name, parts in found["figures"].items():
            merged["figures"].setdefault(beginning + name, {}).update(parts)
    return merged if files else {}


def _load(path: Path) -> Json:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
