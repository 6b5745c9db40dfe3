"""Writes docs/performance.md from the files of reproduction/results/<gpu>: our figures, and the peers' beside them.

Reads files only: whatever a benchmark has not measured is "not measured". The peers' figures are those of peers/*.json,
written by `python -m reproduction.bench.peers`, and for what was not measured so, those entered by hand in peers.json.
"""

from pathlib import Path

from cbatch import ConfigError
from experiments.store.provenance import write_text
from reproduction.bench import summary
from reproduction.bench.measured import Measured, read
from reproduction.bench.peers.rows import BY_HAND
from reproduction.bench.tables import MISSING, Json, Row, markdown, number, source, speeds, stamp

COMMAND = "python -m reproduction.bench report"
HOW_TIMED = (
    "Figures are medians of the runs that a command repeats, or of its single run. Ours are timed from the first plan to the last token, other engines' from the submission of "
    "all requests to the last token. Figures of different dates come from different cards, which vary by a few percent, "
    "and ours of different commits from different kernels: compare rows that were measured at the same one."
)
PEER_SETTINGS = (
    "vLLM's rows with a commit are of `FLASH_ATTN` (version 3), without FlashInfer's sampler, with `gpu_memory_utilization` 0.9 and "
    'without prefix caching; that of transformers is of PyTorch\'s attention (SDPA), for which it neither captures graphs nor runs ahead; rows of "cbatch, transformers" run its layers in our loop.'
)
COPY_SPEED = (
    "Of copy speed: bytes of weights and KV cache read per second, over the {bandwidth} at which a copy on the device reads "
    "and writes; at that speed the work would take the time, or reach the rate, in the column's head. It is a yardstick, "
    "not a bound: kernels that only read can be faster than a copy"
)
NOT_THE_SAME = (
    "Device active: of cbatch, the share of the run in which an iteration computes, short gaps between its kernels "
    "counted; of transformers, in which the GPU is busy. The two are not the same measure."
)


def main(results: str = "reproduction/results/h200", docs: str = "docs", readme: str = "") -> None:
    """Writes the page and the table of `readme`; prints their paths."""
    folder = Path(results)
    if not any(folder.glob("*.json")):
        raise ConfigError(f"results={results}: no results there; run a benchmark first: python -m reproduction.bench")
    page = Path(docs) / "performance.md"
    measured = read(folder)
    write_text(page, text(measured))
    print(page)
    if readme:
        summary.write(Path(readme), measured)
        print(readme)


def text(measured: Measured) -> str:
    peers = measured.peers
    hardware = next((part["hardware"] for part in measured if "hardware" in part), "an unknown device")
    parts = [
        f"# Speed on an {hardware}",
        f"Written by `{COMMAND}` from the files that the commands under each table wrote. {HOW_TIMED}",
    ]
    if "date" in peers:
        parts.append(
            f'Rows measured "{peers["date"]}{BY_HAND}" are other engines on the same work and a GPU of the same kind, '
            "entered by hand: nano-vllm, whose package could not be installed on the machine of the later measurements, "
            "and what was measured before `python -m reproduction.bench.peers` drove vLLM and the continuous batching of "
            f"transformers ({peers['setting']})."
        )
        parts.append(PEER_SETTINGS)
        parts.append(COPY_SPEED.format(bandwidth=peers["copy_bandwidth"]) + _reads_over_copies(measured.attention))
    parts += _batches(measured) + _one_request(measured) + _pd(measured) + _trace(measured)
    return "\n\n".join([*parts, *_attention(measured)]) + "\n"


def _batches(measured: Measured) -> list[str]:
    figures, peers = measured.decode["figures"], measured.peers.get("decode", {})
    parts = ["## Decoding in a batch: llama-3.1-8b, 32 requests, 256 prompt tokens", NOT_THE_SAME]
    for name in sorted({*figures, *peers}, key=lambda name: int(name.split()[0])):
        peer = peers.get(name, {})
        loops = _loops(measured.decode["sources"], name, figures.get(name, {}))
        ours = _ours(loops, "ms_per_iteration")
        parts += [f"### {name} tokens", _table(peer, ours, "ms per iteration", faster_is_less=True)]
        totals = {**peer.get("seconds", {}), **{f"cbatch, {loop}": _median(loops[loop], "seconds") for loop in loops}}
        if known := [f"{who} {number(value)} s" for who, value in totals.items() if value]:
            parts.append(f"In all: {'; '.join(known)}.")
        parts += _sources(peer)
        if shares := [f"{loop} {loops[loop]['kernel_share']:.1%}" for loop in loops if "kernel_share" in loops[loop]]:
            parts.append(f"Kernels or copies run in this share of a profiled window: cbatch, {', '.join(shares)}.")
    return [*parts, _source(measured.decode)]


def _reads_over_copies(attention: Json) -> str:
    """By how much the fastest attention of decodes alone reads faster than a copy; ends the sentence before it."""
    cases = [case for found in attention.values() for case in found["figures"].values() if not case["chunks_alone"]]
    most = max((case["bytes_bound"] / case["time"]["median"] for case in cases), default=0.0) - 1
    return f", by {most:.0%} in the fastest attention below." if most > 0 else "."


def _loops(files: list[Json], work: str, newest: Json) -> Json:
    """Both loops; if one was measured again later, also both as they were measured together, to be compared."""
    loops: Json = {loop: newest.get(loop, {}) for loop in ("sync", "async")}
    if len({found.get("measured") for found in loops.values()}) == 1:
        return loops
    together = [file for file in files if loops.keys() <= file["figures"].get(work, {}).keys()]
    for file in together[-1:]:
        earlier = {loop: file["figures"][work][loop] | {"measured": stamp(file)} for loop in loops}
        again = {loop: found for loop, found in loops.items() if found["measured"] != stamp(file)}
        return {f"{loop}, earlier": found for loop, found in earlier.items()} | again
    return loops


def _one_request(measured: Measured) -> list[str]:
    figures, peer = measured.graphs["figures"], measured.peers.get("one_request", {})
    table = _table(peer, _ours(figures, "output_tokens_per_second"), "output tokens/s")
    parts = ["## One request: llama-2-7b, 32 prompt and 512 new tokens", table, *_sources(peer)]
    if figures:
        keys = ("build_seconds", "capture_seconds", "warm_up_seconds")
        costs = [
            [name, *(number(way.get(key)) for key in keys), way["graphs"], way["measured"]]
            for name, way in figures.items()
        ]
        parts.append(
            markdown(costs, ["", "built in [s]", "captures, of it [s]", "first request [s]", "graphs", "measured"])
        )
    return [*parts, _source(measured.graphs)]


def _pd(measured: Measured) -> list[str]:
    """Throughput by policy: beside the peers at their ratio, then at every ratio."""
    figures, peer = measured.pd["figures"], measured.peers.get("pd", {})
    ratio = peer.get("ratio", next(iter(figures), "14"))
    table = _table(peer, _ours(figures.get(ratio, {}), "tokens_per_second"), "prompt and output tokens/s")
    heading = f"## Prompts and decodes together: llama-13b, 144 requests of 1024 tokens, batch 18, P:D {ratio}"
    parts = [heading, table, *_sources(peer)]
    if len(figures) > 1:
        names = dict.fromkeys(name for policies in figures.values() for name in policies)
        rates = {name: [_median(found.get(name), "tokens_per_second") for found in figures.values()] for name in names}
        parts.append(markdown([[name, *map(number, rates[name])] for name in names], ["tokens/s at P:D", *figures]))
    return [*parts, _source(measured.pd)]


def _trace(measured: Measured) -> list[str]:
    peer, ours = measured.peers.get("trace", {}), _ours(measured.trace["figures"], "tokens_per_second")
    heading = "## A trace, queued at once: llama-3.1-8b, the first 512 requests of the Azure conversation trace"
    return [heading, _table(peer, ours, "prompt and output tokens/s"), *_sources(peer), _source(measured.trace)]


def _attention(measured: Measured) -> list[str]:
    """Attention of decodes beside the time in which a copy reads as many bytes, for each model."""
    parts = ["## Attention of decodes, one layer"] if measured.attention else []
    for model, found in measured.attention.items():
        rows = []
        for name, case in found["figures"].items():
            time, chunks = case["time"]["median"], case["chunks_alone"]
            less = f"{time - chunks['median']:.1f}" if chunks else ""
            rows.append([name, f"{time:.1f}", f"{case['bytes_bound']:.1f}", less])
        table = markdown(rows, ["", "us per layer", "at copy speed", "less its chunk alone"])
        parts += [f"### {model}, beside a chunk in graphs for {found['batch']} requests", table, _source(found)]
    return parts


def _table(peer: Json, ours: list[Row], unit: str, *, faster_is_less: bool = False) -> str:
    shares = peer.get("active_share", {})
    theirs = [Row(name, figures, shares.get(name)) for name, figures in peer.get("engines", {}).items()]
    return speeds(theirs, ours, unit, at_copy_speed=peer.get("bytes_bound"), faster_is_less=faster_is_less)


def _ours(found: Json, key: str) -> list[Row]:
    """A row for each way, loop or policy; `key` names its speed or time."""
    rows = []
    for name, part in found.items():
        figures = {**part[key], "measured": part.get("measured", "")} if key in part else None
        rows.append(Row(f"**cbatch, {name}**", figures, _median(part, "active_share")))
    return rows or [Row("**cbatch**", None)]


def _sources(peer: Json) -> list[str]:
    files = peer.get("sources", [])
    return list(dict.fromkeys(f"{file['engine']['name']}: {source(file)}." for file in files))


def _source(found: Json) -> str:
    files = found.get("sources", [found])
    return "\n\n".join(f"cbatch: {source(file)}." for file in files) or f"cbatch: {MISSING}."


def _median(figures: Json | None, name: str) -> float | None:
    return None if not figures or name not in figures else float(figures[name]["median"])
