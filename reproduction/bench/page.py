"""Writes the page of measured speed, from the results files of one card: ours, and other engines' on the same work.

    python -m reproduction.bench page [results=reproduction/results/h200] [readme=README.md]

Writes results/README.md, a row for every stored figure; with `readme`, the short comparison between two marks of that file.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from cbatch import ConfigError
from experiments.store.provenance import write_text
from reproduction import RESULTS

Json = dict[str, Any]

BEGIN, END = "<!-- begin: written by `python -m reproduction.bench page` -->", "<!-- end -->"
INTRODUCTION = """# Speed on an {hardware}

Written by `python -m reproduction.bench page` from the files in this folder. Figures are medians of the runs that a command repeats.
Runs of cbatch are timed from the first plan to the last token, runs of other engines from the submission of all requests to the last token. Cards
differ by a few percent and commits by their kernels: compare rows of one date and commit.

Rows "by hand" are other engines on the same work and a GPU of the same kind ({setting}). vLLM's rows with a commit use `FLASH_ATTN`
version 3, no FlashInfer sampler, `gpu_memory_utilization` 0.9 and no prefix caching. The row of transformers uses PyTorch's attention, with which it
captures no graphs and does not run ahead.

Of copy speed: the time in which a copy on the device reads the weights and the KV cache at {copy_bandwidth}, over the measured time. The copy is a
yardstick, not a bound. Device active: the share of the run in which an iteration computes."""

FURTHER = {
    "active_share": ("device active", "{:.2%}"),
    "kernel_share": ("kernels run", "{:.1%}"),
    "build_seconds": ("built in [s]", "{:.1f}"),
    "capture_seconds": ("captures, of it [s]", "{:.1f}"),
    "warm_up_seconds": ("first request [s]", "{:.1f}"),
    "bytes_bound": ("at copy speed", "{:.1f}"),
    "chunks_alone": ("its chunk alone", "{:.1f}"),
}
"""Heading and format of further columns, by the figure's name in results files."""


class Section(NamedTuple):
    """A table. files: pattern of the results files. key: the figure's name in them. peers: the section of peers.json."""

    title: str
    files: str
    key: str
    unit: str
    peers: str = ""


class Entry(NamedTuple):
    """A row of a table. figure: median, and extremes of repeats. further: other figures, by their names in `FURTHER`."""

    name: str
    figure: Json
    measured: str
    further: Json


TOKENS = "prompt and output tokens/s"
SECTIONS = (
    Section("Decoding in a batch: llama-3.1-8b, 32 requests, 256 prompt tokens", "async*.json", "ms_per_iteration", "ms per iteration", "decode"),
    Section("One request: llama-2-7b, 32 prompt and 512 new tokens", "graphs*.json", "output_tokens_per_second", "output tokens/s", "one_request"),
    Section("Prompts and decodes: llama-13b, 144 requests of 1,024 tokens, batch 18", "pd*.json", "tokens_per_second", TOKENS, "pd"),
    Section("A trace, queued at once: llama-3.1-8b, 512 requests of the Azure conversation trace", "trace*.json", "tokens_per_second", TOKENS, "trace"),
    Section("Attention of decodes, one layer", "attention-*.json", "time", "us per layer"),
)  # fmt: skip

COMPARED = (
    ("Llama-3.1-8B, 32 requests, 2,048 new tokens", "ms per iteration", "async-2048/2048 new/async/ms_per_iteration", "decode-2048"),
    ("LLaMA-2-7B, one request", "tokens/s", "graphs-1/fused, graphs/output_tokens_per_second", "one"),
    ("LLaMA-13B, batch 18, P:D 14", "tokens/s", "pd-256/14/sarathi, 256 tokens/tokens_per_second", "pd-256"),
    ("Azure trace, batch 128", "tokens/s", "trace-128/sarathi_serve, 1024 tokens/tokens_per_second", "trace-128-2048"),
    ("Azure trace, batch 256", "tokens/s", "trace-256/sarathi_serve, 1024 tokens/tokens_per_second", "trace-256-2048"),
)  # fmt: skip
"""Equal batch, one card, one session: the work, the unit, our figure (file and keys), and vLLM's file."""


def main(results: str = f"{RESULTS}/h200", readme: str = "") -> None:
    """Writes the page and, if `readme` is given, the comparison in that file; prints the paths."""
    folder = Path(results)
    if not any(folder.glob("*.json")):
        raise ConfigError(f"results={results}: no results there; run a benchmark first: python -m reproduction.bench")
    print(write_text(folder / "README.md", text(folder)))
    if readme:
        before, begun, rest = (Path(readme).read_text(encoding="utf-8") if Path(readme).is_file() else "").partition(
            BEGIN
        )
        _, ended, after = rest.partition(END)
        if not (begun and ended):
            raise ConfigError(f"readme={readme}: needs the lines {BEGIN!r} and {END!r}; the table goes between them")
        print(write_text(Path(readme), f"{before}{BEGIN}\n{comparison(folder)}\n{END}{after}"))


def text(folder: Path) -> str:
    """Returns the page: a section for each kind of work of which results are stored."""
    peers = _load(folder / "peers.json")
    parts = [INTRODUCTION.format_map({"hardware": "unknown card", "setting": "", "copy_bandwidth": "?", **peers})]
    for section in SECTIONS:
        theirs = [_load(path) for path in sorted(folder.glob("peers/*.json"))]
        theirs = [file for file in theirs if section.peers and file["section"][0] == section.peers]
        ours = [_load(path) for path in sorted(folder.glob(section.files))]
        by_hand = peers.get(section.peers, {})
        entries = [*_by_hand(by_hand, peers), *map(_of_peer, theirs)]
        entries += [entry for file in ours for entry in _of_file(section, file)]
        if entries:
            bounds = {work: found["bytes_bound"] for work, found in _leaves(by_hand, "bytes_bound")}
            table = _markdown([_row(entry, section.unit, bounds) for entry in entries])
            parts += [f"## {section.title}", table, "\n".join(dict.fromkeys(map(source, (*theirs, *ours))))]
    return "\n\n".join(parts) + "\n"


def comparison(folder: Path) -> str:
    """Returns the table of `COMPARED`: cbatch, vLLM, and the ratio of their speeds."""
    rows = []
    for work, unit, ours, name in COMPARED:
        file, *keys = ours.split("/")
        figure, theirs = _load(folder / f"{file}.json")["figures"], _load(folder / "peers" / f"vllm-{name}.json")
        for key in keys:
            figure = figure[key]
        value, other = figure["median"], theirs["figures"]["value"]["median"]
        faster = other / value if unit.startswith("ms") else value / other
        numbers = {"cbatch": number(value), f"vLLM {theirs['engine']['version']}": number(other)}
        rows.append({"": f"{work} [{unit}]", **numbers, "faster": f"{faster:.2f}x"})
    return _markdown(rows)


def _of_file(section: Section, file: Json) -> Iterator[Entry]:
    """Yields every way in a results file."""
    names = [file["model"]] if section.key == "time" else [f"batch {file['batch']}"] if section.peers == "trace" else []
    for key, found in _leaves(file["figures"], section.key):
        further = {name: _median(found[name]) for name in FURTHER if found.get(name) is not None}
        yield Entry(f"**cbatch, {', '.join([*names, key])}**", found[section.key], stamp(file), further)


def _of_peer(file: Json) -> Entry:
    return Entry(", ".join([*file["section"][1:], file["row"]]), file["figures"]["value"], stamp(file), {})


def _by_hand(figures: Json, peers: Json) -> Iterator[Entry]:
    for key, found in _leaves(figures, "engines"):
        for engine, value in found["engines"].items():
            shares = found.get("active_share", {})
            further = {"active_share": shares[engine]} if engine in shares else {}
            yield Entry(", ".join(filter(None, (key, engine))), {"median": value}, f"{peers['date']}, by hand", further)


def _leaves(figures: Json, wanted: str, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Json]]:
    """Yields the dictionaries that have the wanted key, with the joined keys on the way to each."""
    if wanted in figures:
        yield ", ".join(above), figures
    else:
        for key, found in figures.items():
            if isinstance(found, dict):
                yield from _leaves(found, wanted, (*above, key))


def _row(entry: Entry, unit: str, bounds: Json) -> dict[str, str]:
    """Returns the cells by heading. bounds: the figure at the speed of a copy, by work; a row's name holds its work."""
    value, figure = entry.figure["median"], entry.figure
    spread = f"{number(figure['min'])} to {number(figure['max'])}" if figure.get("repeats", 1) > 1 else ""
    row = {"": entry.name, "measured": entry.measured, unit: number(value), "least to greatest": spread}
    if bound := next((bound for work, bound in bounds.items() if work in entry.name), None):
        row["of copy speed"] = f"{bound / value if unit.startswith('ms') else value / bound:.1%}"
    return row | {
        head: form.format(entry.further[key]) for key, (head, form) in FURTHER.items() if key in entry.further
    }


def stamp(file: Json) -> str:
    """Returns date and commit of the run that wrote a results file."""
    return f"{file['date']}, {file['commit'][:12] if file.get('commit') else 'commit not recorded'}"


def source(file: Json) -> str:
    """Returns how a results file was measured: command, card, date, commit and versions."""
    card = file["hardware"] + (f", driver {file['driver']}" if "driver" in file else "")
    packages = ", ".join(f"{name} {version}" for name, version in file["versions"].items())
    return f"* `{file['command']}`; {card}; {stamp(file)}; {packages}"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _median(figure: Any) -> float:
    return float(figure["median"] if isinstance(figure, dict) else figure)


def _markdown(rows: list[dict[str, str]]) -> str:
    heads = list(dict.fromkeys(head for row in rows for head in row))
    cells = [[row.get(head, "") for head in heads] for row in rows]
    aligned = ("left", *["right"] * (len(heads) - 1))
    return tabulate(cells, heads, tablefmt="github", colalign=aligned, disable_numparse=True)


def _load(path: Path) -> Json:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
