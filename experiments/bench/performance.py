"""Writes docs/performance.md and docs/lanes from the files of results/<gpu>: our figures, and the peers' beside them.

Reads files only: whatever a benchmark has not measured is "not measured". The peers' figures are those of peers.json,
which no command writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from cbatch import ConfigError
from experiments.plots import lanes
from experiments.plots.lane_panels import BENCHMARK
from experiments.plots.style import save

MISSING = "not measured"
COMMAND = "python -m experiments.bench report"
NOT_THE_SAME = (
    "Device active: of cbatch, the share of the run in which an iteration computes, short gaps between its kernels "
    "counted; of transformers, in which the GPU is busy. The two are not the same measure."
)

Json = dict[str, Any]


class Row(NamedTuple):
    """One way to do a piece of work.

    value: its speed or its time, by the table's unit; None: not measured.
    share: of the time, in which the device computes; None: not known.
    """

    name: str
    value: float | None
    share: float | None = None


class Measured(NamedTuple):
    """The files of one folder by name; one that is not there is empty."""

    peers: Json
    decode: Json
    graphs: Json
    pd: Json
    trace: Json
    attention: Json


def main(results: str = "results/h200", docs: str = "docs") -> None:
    """Write the page, and the picture if there is something to draw; print their paths.

    Raises:
        ConfigError: `results` holds no results.
    """
    source = Path(results)
    if not any(source.glob("*.json")):
        raise ConfigError(f"results={results}: no results there; run a benchmark first: python -m experiments.bench")
    page = Path(docs) / "performance.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    drawn = (source / BENCHMARK).is_file()
    page.write_text(text(read(source), drawn=drawn), encoding="utf-8")
    print(page)
    if drawn:
        print(*save(lanes.draw(source), Path(docs), "lanes"), sep="\n")


def read(folder: Path) -> Measured:
    parts = {name: _load(folder / f"{name}.json") for name in ("peers", "graphs", "pd")}
    attention = {found["model"]: found for path in sorted(folder.glob("attention-*.json")) if (found := _load(path))}
    return Measured(decode=_merged(folder, "async"), trace=_merged(folder, "trace"), attention=attention, **parts)


def text(measured: Measured, *, drawn: bool) -> str:
    peers = measured.peers
    hardware = next((part["hardware"] for part in measured if "hardware" in part), "an unknown device")
    parts = [
        f"# Measured on one {hardware}",
        f"Written by `{COMMAND}` from the files that the command under each table wrote. Figures are medians.",
    ]
    if peers:
        parts.append(
            f"Peers: {peers['date']}; {peers['setting']}. {peers['note']} The bytes bound is the time that reading "
            f"weights and KV cache takes at {peers['copy_bandwidth']}, the speed of a copy on the device."
        )
    for part in (
        _batches(measured, drawn),
        _one_request(measured),
        _pd(measured),
        _trace(measured),
        _attention(measured),
    ):
        parts += part
    return "\n\n".join(parts) + "\n"


def _batches(measured: Measured, drawn: bool) -> list[str]:
    """The large batch of equal requests, for each number of new tokens."""
    figures, peers = measured.decode.get("figures", {}), measured.peers.get("decode", {})
    parts = ["## Decoding in a batch: llama-3.1-8b, 32 requests, 256 prompt tokens", NOT_THE_SAME]
    for name in sorted({*figures, *peers}, key=lambda name: int(name.split()[0])):
        peer, loops = peers.get(name, {}), figures.get(name, {})
        theirs = [Row(who, value, peer["active_share"].get(who)) for who, value in peer.get("engines", {}).items()]
        ours = [
            Row(
                f"**cbatch, {loop}**",
                _median(loops.get(loop), "ms_per_iteration"),
                _median(loops.get(loop), "active_share"),
            )
            for loop in ("sync", "async")
        ]
        parts += [f"### {name} tokens", _table([*theirs, *ours], "ms per iteration", peer, faster_is_less=True)]
        totals = {
            **peer.get("seconds", {}),
            **{f"cbatch, {loop}": _median(loops.get(loop), "seconds") for loop in ("sync", "async")},
        }
        known = [f"{who} {_number(value)} s" for who, value in totals.items() if value]
        parts += [f"In all: {'; '.join(known)}."] if known else []
        kernels = [
            f"{loop} {loops[loop]['kernel_share']:.1%}"
            for loop in ("sync", "async")
            if "kernel_share" in loops.get(loop, {})
        ]
        parts += (
            [f"Kernels or copies run in this share of a profiled window: cbatch, {', '.join(kernels)}."]
            if kernels
            else []
        )
    picture = ["![Host and device during decode iterations, sync and async](lanes.png)"] if drawn else []
    return [*parts, *picture, _source(measured.decode)]


def _one_request(measured: Measured) -> list[str]:
    """One request: the rate of each way to compute, and what it costs before."""
    figures, peer = measured.graphs.get("figures", {}), measured.peers.get("one_request", {})
    theirs = [Row(*item) for item in peer.get("engines", {}).items()]
    ours = [Row(f"**cbatch, {name}**", _median(way, "output_tokens_per_second")) for name, way in figures.items()]
    costs = [
        [
            name,
            *(_number(way.get(key)) for key in ("build_seconds", "capture_seconds", "warm_up_seconds")),
            way["graphs"],
        ]
        for name, way in figures.items()
    ]
    head = ["", "built in [s]", "captures, of it [s]", "first request [s]", "graphs"]
    return [
        "## One request: llama-2-7b, 32 prompt and 512 new tokens",
        _table([*theirs, *(ours or [Row("**cbatch**", None)])], "output tokens/s", peer),
        *([_markdown(costs, head)] if costs else []),
        _source(measured.graphs),
    ]


def _pd(measured: Measured) -> list[str]:
    """Throughput by policy: beside the peers at their ratio, then at every ratio."""
    figures, peer = measured.pd.get("figures", {}), measured.peers.get("pd", {})
    ratio = peer.get("ratio", next(iter(figures), "14"))
    theirs = [Row(*item) for item in peer.get("engines", {}).items()]
    ours = _policies(figures.get(ratio, {}))
    parts = [
        f"## Prompts and decodes together: llama-13b, 144 requests of 1024 tokens, batch 18, P:D {ratio}",
        _table([*theirs, *ours], "prompt and output tokens/s", peer),
    ]
    if len(figures) > 1:
        names = list(dict.fromkeys(name for policies in figures.values() for name in policies))
        rows = [
            [name, *(_number(_median(policies.get(name), "tokens_per_second")) for policies in figures.values())]
            for name in names
        ]
        parts.append(_markdown(rows, ["tokens/s at P:D", *figures]))
    return [*parts, _source(measured.pd)]


def _trace(measured: Measured) -> list[str]:
    peer = measured.peers.get("trace", {})
    theirs = [Row(*item) for item in peer.get("engines", {}).items()]
    return [
        "## A trace, queued at once: llama-3.1-8b, the first 512 requests of the Azure conversation trace, batch 128",
        _table([*theirs, *_policies(measured.trace.get("figures", {}))], "prompt and output tokens/s", peer),
        _source(measured.trace),
    ]


def _attention(measured: Measured) -> list[str]:
    """Decodes' attention against the bytes that it reads, for each model."""
    head = ["", "us a layer", "bytes alone", "less its chunk alone"]
    parts = ["## Attention of decodes, one layer"]
    for model, found in measured.attention.items():
        rows = [
            [
                name,
                f"{case['time']['median']:.1f}",
                f"{case['bytes_bound']:.1f}",
                f"{case['time']['median'] - case['chunks_alone']['median']:.1f}" if case["chunks_alone"] else "",
            ]
            for name, case in found["figures"].items()
        ]
        parts += [
            f"### {model}, beside a chunk in graphs for {found['batch']} requests",
            _markdown(rows, head),
            _source(found),
        ]
    return parts if measured.attention else []


def _policies(figures: Json) -> list[Row]:
    rows = [
        Row(f"**cbatch, {name}**", _median(found, "tokens_per_second"), _median(found, "active_share"))
        for name, found in figures.items()
    ]
    return rows or [Row("**cbatch**", None)]


def _table(rows: Iterable[Row], unit: str, peer: Json, *, faster_is_less: bool = False) -> str:
    """Rows with their speed as a multiple of the peer's that is compared with, and as a share of the bytes bound's."""
    rows, reference, bound = list(rows), peer.get("engines", {}).get(peer.get("compared_with")), peer.get("bytes_bound")
    head = ["", unit]
    columns = [[row.name for row in rows], [_number(row.value) for row in rows]]

    def speed(value: float | None, against: float) -> float | None:
        return None if value is None else against / value if faster_is_less else value / against

    if reference:
        head.append(f"speed over {peer['compared_with']}")
        columns.append([_formatted(speed(row.value, reference), "{:.3f}") for row in rows])
    if bound:
        head.append(f"of the bytes bound, {bound}")
        columns.append([_formatted(speed(row.value, bound), "{:.1%}") for row in rows])
    if any(row.share is not None for row in rows):
        head.append("device active")
        columns.append([_formatted(row.share, "{:.2%}", "") for row in rows])
    return _markdown(zip(*columns, strict=True), head)


def _markdown(rows: Iterable[Iterable[Any]], head: list[str]) -> str:
    aligned = ("left", *["right"] * (len(head) - 1))
    return tabulate(list(rows), head, tablefmt="github", colalign=aligned, disable_numparse=True)


def _merged(folder: Path, benchmark: str) -> Json:
    """The files of a benchmark that may be measured part by part. The newest figure stands; of one date, `benchmark`.json's."""
    paths = [folder / f"{benchmark}.json", *folder.glob(f"{benchmark}-*.json")]
    files = [found for path in reversed(paths) if (found := _load(path)).get("figures")]
    files.sort(key=lambda found: found["date"])
    merged: Json = {"commands": [], "figures": {}}
    for found in files:
        merged.update({key: found[key] for key in ("hardware", "date", "versions")})
        merged["commands"].append(found["command"])
        for name, parts in found["figures"].items():
            merged["figures"].setdefault(name, {}).update(parts)
    return merged if files else {}


def _source(found: Json) -> str:
    if not found:
        return f"cbatch: {MISSING}."
    commands = found.get("commands") or [found["command"]]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"cbatch: {', '.join(f'`{command}`' for command in commands)}; {found['date']}; {versions}."


def _load(path: Path) -> Json:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _median(figures: Json | None, name: str) -> float | None:
    return None if not figures or name not in figures else float(figures[name]["median"])


def _number(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _formatted(value: float | None, form: str, missing: str = "-") -> str:
    return missing if value is None else form.format(value)
