"""Writes the page of measured speed, from the results files of one card: ours, and other engines' on the same work.

    python -m reproduction.bench page [results=reproduction/results/h100] [readme=README.md]

Writes results/README.md, a row for every stored figure; with `readme`, the short comparison between two marks of that file.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tabulate import tabulate

from cbatch import ConfigError
from experiments.store.provenance import write_text
from reproduction import RESULTS

Json = dict[str, Any]

BEGIN, END = "<!-- begin: written by `python -m reproduction.bench page` -->", "<!-- end -->"
TABLES: Json = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FURTHER: dict[str, list[str]] = TABLES["further"]
"""Heading and format of further columns, by the figure's name in results files."""

TIMES = ("s", "ms per iteration")
"""Units of which less is faster."""


class Section(NamedTuple):
    """A table. files: pattern of the results files. key: the figure's name in them. peers: the work in peers.json."""

    title: str
    files: str
    key: str
    unit: str
    peers: str


class Entry(NamedTuple):
    """A row of a table. figure: median, and extremes of repeats. further: other figures, by their names in `FURTHER`."""

    name: str
    figure: Json
    measured: str
    further: Json


def main(results: str = f"{RESULTS}/h100", readme: str = "") -> None:
    """Writes the page and, if `readme` is given, the comparison in that file; prints the paths."""
    folder = Path(results)
    if not any(folder.glob("*.json")):
        raise ConfigError(f"results={results}: no results there; run a benchmark first: python -m reproduction.bench")
    print(write_text(folder / "README.md", text(folder)))
    if readme:
        whole = Path(readme).read_text(encoding="utf-8") if Path(readme).is_file() else ""
        before, begun, rest = whole.partition(BEGIN)
        _, ended, after = rest.partition(END)
        if not (begun and ended):
            raise ConfigError(f"readme={readme}: needs the lines {BEGIN!r} and {END!r}; the table goes between them")
        print(write_text(Path(readme), f"{before}{BEGIN}\n{comparison(folder)}\n{END}{after}"))


def text(folder: Path) -> str:
    """Returns the page: a section for each kind of work of which results are stored."""
    hardware = _load(min(folder.glob("*.json")))["hardware"]
    parts = [TABLES["introduction"].strip().format(hardware=hardware)]
    engines = [{"hardware": hardware, **engine} for engine in _engines(folder).values()]
    for section in (Section(**section) for section in TABLES["sections"]):
        theirs = [engine for engine in engines if engine["section"][0] == section.peers]
        ours = [_load(path) for path in sorted(folder.glob(section.files))]
        entries = [
            Entry(
                ", ".join([*file["section"][1:], file["row"]]),
                file["figures"]["value"],
                stamp(file),
                _further(file["figures"]),
            )
            for file in theirs
        ]
        entries += [entry for file in ours for entry in _of_file(section, file)]
        if entries:
            table = _markdown([_row(entry, section.unit) for entry in entries])
            parts += [f"## {section.title}", table, "\n".join(dict.fromkeys(map(source, (*theirs, *ours))))]
    return "\n\n".join(parts) + "\n"


def comparison(folder: Path) -> str:
    """Returns the table of what is compared in the README: cbatch, a version of each other engine, and how much faster than the fastest of these cbatch is.

    Raises:
        ConfigError: none of these versions was measured on some of the work.
    """
    stored, rows = _engines(folder), []
    names = {f"{label} {version}": f"{label.lower()}-{version}" for label, version in TABLES["engines"].items()}
    missing = [
        case for *_, case in TABLES["compared"] if not any(f"{name}-{case}" in stored for name in names.values())
    ]
    if missing:
        raise ConfigError(
            f"{', '.join(names)}: {folder}/peers.json has no {', '.join(missing)}; measure these, or set other versions in page.yaml"
        )
    for work, unit, ours, case in TABLES["compared"]:
        file, *keys = ours.split("/")
        figure = _load(folder / f"{file}.json")["figures"]
        for key in keys:
            figure = figure[key]
        found = {label: stored.get(f"{name}-{case}") for label, name in names.items()}
        theirs = {label: engine["figures"]["value"]["median"] for label, engine in found.items() if engine}
        value = figure["median"]
        ratios = [other / value if unit in TIMES else value / other for other in theirs.values()]
        cells = {label: number(theirs[label]) if label in theirs else "" for label in names}
        rows.append({"": f"{work} [{unit}]", "cbatch": number(value), **cells, "faster": f"{min(ratios):.2f}x"})
    return _markdown(rows)


def _engines(folder: Path) -> Json:
    """Returns what other engines took on the card, by engine and work."""
    return dict(_load(folder / "peers.json").get("engines", {}))


def _of_file(section: Section, file: Json) -> Iterator[Entry]:
    """Yields every way in a results file."""
    names = [f"batch {file['batch']}"] if section.peers == "trace" else []
    for key, found in _leaves(file["figures"], section.key):
        name = ", ".join([*names, key])
        name = f"transformers, {name}" if key.startswith("static KV") else f"**cbatch, {name}**"
        yield Entry(name, found[section.key], stamp(file), _further(found))


def _further(figures: Json) -> Json:
    """Returns the figures of further columns."""
    known = {name: figures[name] for name in FURTHER if figures.get(name) is not None}
    return {name: value["median"] if isinstance(value, dict) else value for name, value in known.items()}


def _leaves(figures: Json, wanted: str, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Json]]:
    """Yields the dictionaries that have the wanted key, with the joined keys on the way to each."""
    if wanted in figures:
        yield ", ".join(above), figures
    else:
        for key, found in figures.items():
            if isinstance(found, dict):
                yield from _leaves(found, wanted, (*above, key))


def _row(entry: Entry, unit: str) -> dict[str, str]:
    """Returns the cells by heading."""
    value, figure = entry.figure["median"], entry.figure
    spread = f"{number(figure['min'])} to {number(figure['max'])}" if figure.get("repeats", 1) > 1 else ""
    row = {"": entry.name, "measured": entry.measured, unit: number(value), "least to greatest": spread}
    return row | {
        head: form.format(entry.further[key]) for key, (head, form) in FURTHER.items() if key in entry.further
    }


def stamp(file: Json) -> str:
    """Returns date and commit of the run that wrote a results file."""
    return f"{file['date']}, {file['commit'][:12] if file.get('commit') else 'commit not recorded'}"


def source(file: Json) -> str:
    """Returns how a results file was measured: command, card, date, commit, versions, and its note if it has one."""
    card = file["hardware"] + (f", driver {file['driver']}" if "driver" in file else "")
    packages = ", ".join(f"{name} {version}" for name, version in file["versions"].items())
    note = f"; {file['note']}" if "note" in file else ""
    return f"* `{file['command']}`; {card}; {stamp(file)}; {packages}{note}"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _markdown(rows: list[dict[str, str]]) -> str:
    heads = list(dict.fromkeys(head for row in rows for head in row))
    cells = [[row.get(head, "") for head in heads] for row in rows]
    aligned = ("left", *["right"] * (len(heads) - 1))
    return tabulate(cells, heads, tablefmt="github", colalign=aligned, disable_numparse=True)


def _load(path: Path) -> Json:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
