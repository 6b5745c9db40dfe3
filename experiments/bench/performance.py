"""Writes docs/performance.md and docs/lanes from the files of results/<gpu>: our figures, and the peers' beside them.

Reads files only: whatever a benchmark has not measured is "not measured". The peers' figures are those of peers/*.json,
written by `python -m experiments.bench.peers`, and for what was not measured so, those entered by hand in peers.json.
"""

from __future__ import annotations

from pathlib import Path

from cbatch import ConfigError
from experiments.bench import summary
from experiments.bench.measured import Measured, read
from experiments.bench.peers import rows as peer_rows
from experiments.bench.tables import MISSING, Json, Row, markdown, number, speeds
from experiments.plots import lanes
from experiments.plots.lane_panels import BENCHMARK
from experiments.plots.style import save

COMMAND = "python -m experiments.bench report"
HOW_TIMED = (
    "Figures are medians. Ours are timed from the first plan to the last token, other engines' from the submission of all "
    "requests to the last token."
)
NOT_THE_SAME = (
    "Device active: of cbatch, the share of the run in which an iteration computes, short gaps between its kernels "
    "counted; of transformers, in which the GPU is busy. The two are not the same measure."
)


def main(results: str = "results/h200", docs: str = "docs", readme: str = "") -> None:
    """Write the page, the picture if there is something to draw, and the table of `readme`; print their paths.

    Raises:
        ConfigError: `results` holds no results, or `readme` has no place for the table.
    """
    source = Path(results)
    if not any(source.glob("*.json")):
        raise ConfigError(f"results={results}: no results there; run a benchmark first: python -m experiments.bench")
    page = Path(docs) / "performance.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    drawn = (source / BENCHMARK).is_file()
    measured = read(source)
    page.write_text(text(measured, drawn=drawn), encoding="utf-8")
    print(page)
    if readme:
        summary.write(Path(readme), measured)
        print(readme)
    if drawn:
        print(*save(lanes.draw(source), Path(docs), "lanes"), sep="\n")


def text(measured: Measured, *, drawn: bool) -> str:
    peers = measured.peers
    hardware = next((part["hardware"] for part in measured if "hardware" in part), "an unknown device")
    parts = [
        f"# Measured on one {hardware}",
        f"Written by `{COMMAND}` from the files that the command under each table wrote. {HOW_TIMED}",
    ]
    if "date" in peers:
        parts.append(
            f"Peers marked{peer_rows.BY_HAND}: {peers['date']}; {peers['setting']}. {peers['note']} The bytes bound is the "
            f"time that reading weights and KV cache takes at {peers['copy_bandwidth']}, the speed of a copy on the device."
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
        ours = [
            Row(
                f"**cbatch, {loop}**",
                loops.get(loop, {}).get("ms_per_iteration"),
                _median(loops.get(loop), "active_share"),
            )
            for loop in ("sync", "async")
        ]
        table = speeds(_theirs(peer), ours, "ms per iteration", bound=peer.get("bytes_bound"), faster_is_less=True)
        parts += [f"### {name} tokens", table]
        totals = {
            **peer.get("seconds", {}),
            **{f"cbatch, {loop}": _median(loops.get(loop), "seconds") for loop in ("sync", "async")},
        }
        known = [f"{who} {number(value)} s" for who, value in totals.items() if value]
        parts += [f"In all: {'; '.join(known)}."] if known else []
        parts += _sources(peer)
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
    ours = [Row(f"**cbatch, {name}**", way.get("output_tokens_per_second")) for name, way in figures.items()]
    costs = [
        [
            name,
            *(number(way.get(key)) for key in ("build_seconds", "capture_seconds", "warm_up_seconds")),
            way["graphs"],
        ]
        for name, way in figures.items()
    ]
    head = ["", "built in [s]", "captures, of it [s]", "first request [s]", "graphs"]
    return [
        "## One request: llama-2-7b, 32 prompt and 512 new tokens",
        speeds(_theirs(peer), ours or [Row("**cbatch**", None)], "output tokens/s", bound=peer.get("bytes_bound")),
        *_sources(peer),
        *([markdown(costs, head)] if costs else []),
        _source(measured.graphs),
    ]


def _pd(measured: Measured) -> list[str]:
    """Throughput by policy: beside the peers at their ratio, then at every ratio."""
    figures, peer = measured.pd.get("figures", {}), measured.peers.get("pd", {})
    ratio = peer.get("ratio", next(iter(figures), "14"))
    ours = _policies(figures.get(ratio, {}))
    parts = [
        f"## Prompts and decodes together: llama-13b, 144 requests of 1024 tokens, batch 18, P:D {ratio}",
        speeds(_theirs(peer), ours, "prompt and output tokens/s", bound=None),
        *_sources(peer),
    ]
    if len(figures) > 1:
        names = list(dict.fromkeys(name for policies in figures.values() for name in policies))
        rows = [
            [name, *(number(_median(policies.get(name), "tokens_per_second")) for policies in figures.values())]
            for name in names
        ]
        parts.append(markdown(rows, ["tokens/s at P:D", *figures]))
    return [*parts, _source(measured.pd)]


def _trace(measured: Measured) -> list[str]:
    peer = measured.peers.get("trace", {})
    ours = _policies(measured.trace.get("figures", {}))
    return [
        "## A trace, queued at once: llama-3.1-8b, the first 512 requests of the Azure conversation trace",
        speeds(_theirs(peer), ours, "prompt and output tokens/s", bound=None),
        *_sources(peer),
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
            markdown(rows, head),
            _source(found),
        ]
    return parts if measured.attention else []


def _policies(figures: Json) -> list[Row]:
    rows = [
        Row(f"**cbatch, {name}**", found["tokens_per_second"], _median(found, "active_share"))
        for name, found in figures.items()
    ]
    return rows or [Row("**cbatch**", None)]


def _theirs(peer: Json) -> list[Row]:
    """The other engines' rows of a section."""
    shares = peer.get("active_share", {})
    return [Row(name, figures, shares.get(name)) for name, figures in peer.get("engines", {}).items()]


def _sources(peer: Json) -> list[str]:
    """How the other engines' measured figures of a section came about, a paragraph for each command."""
    files = peer.get("sources", [])
    return list(dict.fromkeys(f"{file['engine']['name']}: {peer_rows.source(file)}." for file in files))


def _source(found: Json) -> str:
    if not found:
        return f"cbatch: {MISSING}."
    return f"cbatch: {'; '.join(_origin(file) for file in found.get('sources', [found]))}."


def _origin(file: Json) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in file["versions"].items())
    return f"`{file['command']}`; {file['date']}; {versions}"


def _median(figures: Json | None, name: str) -> float | None:
    return None if not figures or name not in figures else float(figures[name]["median"])
