"""The commands of `cases.txt` make what they made before: each line is `name hashes | command ; command`.

`pytest tests/golden --golden=write` writes the hashes of today's results. A hash that changes without a known reason is a fault.

A hash is of values, not of bytes: tables by column, numbers as floats, summaries without `about`. Real tokens take real time, so
of these only what no clock changes counts: the output of each request, and what each iteration computes.
"""

import csv
import gzip
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Ended, command

HERE = Path(__file__).parent
CASES = HERE / "cases.txt"
TIMED = {"about", "settings", "wall_seconds", "cpu_seconds"}
"""Keys of results that depend on the machine, the code or the command line."""


def cases() -> dict[str, tuple[str, str]]:
    """Returns (hashes, commands) by name."""
    lines = (line.partition(" | ") for line in CASES.read_text().splitlines())
    return {left.split()[0]: (" ".join(left.split()[1:]), right) for left, _, right in lines}


def marked() -> Iterator[Any]:
    """Yields the names; cases of more than one run are long, and every second one of the others."""
    for place, (name, (_, commands)) in enumerate(cases().items()):
        one = commands.startswith("run ") and " ; " not in commands and " -m " not in commands
        yield pytest.param(name, marks=() if one and place % 2 else pytest.mark.long)


@pytest.mark.parametrize("name", [*marked()])
def test_commands_make_the_same(name: str, tmp_path: Path, golden: str) -> None:
    before, commands = cases()[name]
    for file in ("own_code.py", "trace.csv"):
        shutil.copy(HERE / file, tmp_path)
    ended = [run(arguments.split(), tmp_path) for arguments in commands.split(" ; ")]
    hashes = hashes_of(tmp_path)
    if commands.startswith("compare") or "replay" in commands:
        hashes["printed"] = digest(printed_numbers(ended))
    now = " ".join(f"{kind}:{text}" for kind, text in hashes.items())
    if golden == "write":
        write(name, now)
    else:
        assert now == before, f"`{commands}` made something else"


def outputs(path: Path) -> list[dict[str, Any]]:
    """Returns the tokens of each request."""
    lines = map(json.loads, path.read_text().splitlines())
    return [{"id": line["id"], "output": line["output"]} for line in lines]


def run(arguments: list[str], folder: Path) -> Ended:
    """Runs a command. A single run without a folder of its own writes to `out`."""
    single = (
        arguments[0] in ("run", "capacity")
        and not {"-m", "output=first"} & set(arguments)
        and "seeds=" not in str(arguments)
    )
    ended = command(*arguments, *["output=out"] * single, cwd=folder)
    assert ended.returncode in ((0, 1) if arguments[0] == "replay" else (0,)), ended
    return ended


def hashes_of(folder: Path) -> dict[str, str]:
    """Returns one hash for each kind of results in and below a folder, whatever the folders of the runs are called."""
    real = any(folder.rglob("outputs.jsonl"))
    readers = {
        "requests": ("requests.csv", request_lengths if real else columns),
        "steps": ("steps.csv", None if real else columns),
        "tokens": ("outputs.jsonl", outputs),
        "plans": ("decisions.jsonl.gz", plans if real else None),
        "summary": ("summary.json", None if real else figures),
        "cells": ("cell.json", figures),
        "capacity": ("capacity.json", figures),
    }
    values = {
        kind: sorted(digest(read(path)) for path in folder.rglob(name))
        for kind, (name, read) in readers.items()
        if read
    }
    return {kind: digest(found) for kind, found in values.items() if found}


def columns(path: Path) -> dict[str, list[Any]]:
    """Returns a table's columns by name, numbers as floats."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    return {name: [number(row[place]) for row in rows] for place, name in enumerate(header)}


def request_lengths(path: Path) -> list[Any]:
    """Returns the columns of requests.csv in which there is no time; which request ends first depends on the clock."""
    table = columns(path)
    return sorted(
        zip(*(table[name] for name in ("id", "prompt_tokens", "output_tokens", "finish_reason")), strict=True)
    )


def plans(path: Path) -> list[Any]:
    """Returns what each plan of a run decided; a plan to wait is not counted, as it depends on the clock."""
    with gzip.open(path, "rt") as file:
        decided = [line["plan"]["decided"] for line in map(json.loads, file) if "plan" in line]
    kinds = [[plan[kind] for kind in ("entries", "preempt", "reject", "reserve", "pad_to")] for plan in decided]
    return [plan for plan in kinds if any(plan)]


def figures(path: Path) -> Any:
    def without_time(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_time(inner) for key, inner in value.items() if key not in TIMED}
        if isinstance(value, list):
            return [without_time(inner) for inner in value]
        return float(f"{value:.12g}") if isinstance(value, float) and math.isfinite(value) else value

    return without_time(json.loads(path.read_text()))


def number(text: str) -> Any:
    try:
        return float(text) if text not in ("", "nan") else ""
    except ValueError:
        return text


def printed_numbers(ended: Iterable[Ended]) -> list[str]:
    """Returns ratios and differences with their intervals, and how many plans a replay changes."""
    pattern = r"[-+]?[\d.,]+x? \[[^\]]*\]|\b\d+ of \d+\b|\bsame \d+\b"
    return [text for end in ended for text in re.findall(pattern, end.stdout)]


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def write(name: str, now: str) -> None:
    """Writes the hashes of one case; the others stay."""
    lines = [f"{key} {now if key == name else hashes} | {commands}" for key, (hashes, commands) in cases().items()]
    CASES.write_text("\n".join(lines) + "\n")
