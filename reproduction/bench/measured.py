"""The results of one folder as the pages of figures need them: parts of a benchmark merged, peers beside ours."""

import json
from pathlib import Path
from typing import NamedTuple

from reproduction.bench.peers import rows as peer_rows
from reproduction.bench.tables import Json, stamp

NESTED = {"async", "pd"}
"""Benchmarks that measure several loops or policies on each piece of work."""

BESIDE_PEERS = {"pd", "trace"}
"""Benchmarks whose parts were measured on a peer's card in the same session: they stand before newer ones of other cards."""


class Measured(NamedTuple):
    """decode, graphs, pd and trace hold merged "figures" and their "sources", both empty if nothing was measured.

    Each way, policy or loop has its date and commit under "measured".

    peers: see `peers.rows.read`. attention: files by model.
    """

    peers: Json
    decode: Json
    graphs: Json
    pd: Json
    trace: Json
    attention: Json


def read(folder: Path) -> Measured:
    decode, graphs, pd, trace = (_merge(folder, name) for name in ("async", "graphs", "pd", "trace"))
    attention = {found["model"]: found for found in map(_load, sorted(folder.glob("attention-*.json")))}
    return Measured(peer_rows.read(folder), decode, graphs, pd, trace, attention)


def _merge(folder: Path, benchmark: str) -> Json:
    """Merges the files of a benchmark that may be measured part by part.

    The newest figure stands, but see `BESIDE_PEERS`; of one date, that of a part. A trace's figures' names begin with the batch.
    """
    whole, apart = folder / f"{benchmark}.json", benchmark in BESIDE_PEERS
    paths = [whole, *sorted(folder.glob(f"{benchmark}-*.json"), reverse=True)]
    found_in = {path: found for path in paths if path.is_file() and (found := _load(path)).get("figures")}
    files = [
        found_in[path] for path in sorted(found_in, key=lambda path: (apart and path != whole, found_in[path]["date"]))
    ]
    merged: Json = {"sources": files, "figures": {}}
    for found in files:
        merged["hardware"] = found["hardware"]
        beginning = f"batch {found['batch']}, " if benchmark == "trace" else ""
        for name, parts in found["figures"].items():
            dated: Json = {"measured": stamp(found)}
            if benchmark in NESTED:
                ways = {way: figures for way, figures in parts.items() if isinstance(figures, dict)}
                dated = {way: figures | dated for way, figures in ways.items()}
            else:
                dated |= parts
            merged["figures"].setdefault(beginning + name, {}).update(dated)
    return merged


def _load(path: Path) -> Json:
    return dict(json.loads(path.read_text(encoding="utf-8")))
