"""Reads text files, plain or compressed, with tables of CSV or JSON lines. Errors name the file, the line and the column."""

import csv
import gzip
import json
import lzma
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from difflib import get_close_matches
from io import StringIO
from itertools import islice, zip_longest
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from cbatch import WorkloadError
from cbatch.validation import nearest, shorten
from experiments.workloads.trace import Floats, Ints


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of a file.

    path: the file. columns: text (CSV) or JSON values by name; None: missing value. lines: line number of each row, from 1.
    """

    path: str
    columns: Mapping[str, list[Any]]
    lines: Sequence[int]

    def column(self, name: str, key: str = "") -> list[Any]:
        """Returns a column. key: the setting that names the column, for messages. Raises WorkloadError if it does not exist."""
        if name not in self.columns:
            near = [f"rename {other}, or " for other in get_close_matches(name, list(self.columns), 1, 0.9)]
            add = f"{''.join(near)}add it to {', '.join(self.columns)}"
            remedy = shorten(nearest(name, self.columns) if key else add)
            raise WorkloadError(f"{self.path}: {key}no column {name!r}; {remedy}")
        return self.columns[name]

    def amounts(self, name: str) -> Floats:
        """Returns a column of finite numbers, [rows]. Raises WorkloadError that names the first line without a finite number."""
        numbers = np.array([as_number(value) for value in self.column(name)])
        self.refuse(~np.isfinite(numbers), name, "must be a finite number")
        return numbers

    def since_first(self, name: str) -> Floats:
        """Returns a column of numbers minus the first number, [rows], exact for large numbers. Raises WorkloadError like `amounts`."""
        self.amounts(name)
        numbers = [Decimal(str(value)) for value in self.columns[name]]
        return np.array([float(number - numbers[0]) for number in numbers])

    def whole_numbers(self, name: str, least: int = -(2**62), most: int = 2**62, unit: str = "") -> Ints:
        """Returns a column of whole numbers in this range, [rows]. Raises WorkloadError like `amounts`."""
        numbers = np.array([as_number(value) for value in self.column(name)])
        limit = f", at least {least}" if least >= 0 else ""
        valid = (numbers >= least) & (numbers <= most) & (numbers == np.floor(numbers))
        self.refuse(~valid, name, f"must be a whole number{unit}{limit}")
        return numbers.astype(np.int64)

    def times(self, name: str) -> Floats:
        """Returns a column of wall-clock times (by default UTC) as seconds since the first row, [rows], with 1 us resolution."""
        times = [_time(value) for value in self.column(name)]
        self.refuse([time is None for time in times], name, "must be a time such as 2023-11-16 18:15:46.6805900")
        known = [time for time in times if time is not None]
        return np.array([(time - known[0]) // timedelta(microseconds=1) for time in known]) / 1e6

    def refuse(self, bad: Any, name: str, problem: str, remedy: str = "correct or remove the line") -> None:
        """Raises WorkloadError for the first bad row, if any. bad: [rows]. name: the column to quote."""
        if (rows := np.flatnonzero(bad)).size:
            value = self.columns[name][rows[0]]
            stated = f"{name} is missing" if value is None else f"{name}={shorten(repr(value))}"
            raise at_line(self.path, self.lines[rows[0]], f"{stated}: {problem}; {remedy}")


def as_number(value: object) -> float:
    """Converts a value from a file to a number; NaN if it is no number."""
    try:
        return float(str(value))
    except ValueError:
        return nan


def _time(value: object) -> datetime | None:
    try:
        time = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def parse_table(path: str, text: str, at_most: int | None = None) -> Table:
    """Parses a CSV file with a header, or a file with a JSON object on each line.

    at_most: maximum rows to read; None: all. Raises WorkloadError if the text has neither format, or has no rows.
    """
    if text.lstrip().startswith(("{", "[")):
        objects = json_objects(path, text, at_most)
        names = dict.fromkeys(name for row in objects for name in row)
        return Table(path, {name: [row.get(name) for row in objects] for name in names}, range(1, 1 + len(objects)))
    try:
        lines = csv.reader(StringIO(text), strict=True, skipinitialspace=True)
        header, *rows = lines if at_most is None else islice(lines, 1 + at_most)
    except csv.Error as error:
        raise WorkloadError(f"{path}: is not CSV ({error}); give a CSV or JSON-lines file") from None
    for line, row in enumerate([header, *rows], 1):
        if not row:
            raise at_line(path, line, "is empty; remove it")
        if len(row) > len(header):
            problem = f"has {len(row)} fields under a header of {len(header)}"
            raise at_line(path, line, f"{problem}; correct or remove the line")
        for mark in ";\t" if len(row) < (2 if line == 1 else len(header)) else ():
            if "".join(row).count(mark) >= max(len(header) - 1, 1):
                raise at_line(path, line, f"has fields separated by {mark!r}; separate them by commas")
    if not rows:
        raise at_line(path, 1, f"{shorten(','.join(header))} is a header without rows; give a file with requests")
    columns: dict[str, list[str | None]] = {}
    for name, *values in zip_longest(header, *rows):
        columns.setdefault(name.strip(), values)
    return Table(path, columns, range(2, 2 + len(rows)))


def read_text(path: str, key: str = "workload.path") -> str:
    """Returns the text of a UTF-8 file. Files with names in .gz or .xz are decompressed. key: the setting, for messages.

    Raises WorkloadError if the file is missing, unreadable, empty, not text, or not compressed despite its name.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise WorkloadError(f"{key}={path!r}: give the path of a file")
    file = Path(path).expanduser()
    open_file: Any = {".gz": gzip.open, ".xz": lzma.open}.get(file.suffix, open)
    try:
        with open_file(file, "rt", encoding="utf-8-sig") as opened:
            text = str(opened.read())
    except FileNotFoundError:
        remedy = f"give {key}=FILE; a relative path starts from the current folder"
        raise WorkloadError(f"{key}={path}: no such file; {remedy}") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "give UTF-8 text, compressed only if the name ends in .gz or .xz, or copy the file again"
        if file.is_dir():
            remedy = f"give a file; a run's folder has {file / 'decisions.jsonl.gz'} after decisions=true"
        raise WorkloadError(f"{key}={path}: cannot be read ({reason}); {remedy}") from None
    if not text.strip():
        raise WorkloadError(f"{path}: the file is empty; give one with requests")
    return text


def at_line(path: str, line: int, problem: str) -> WorkloadError:
    """Returns the error to raise for a line of a file. line: counted from 1."""
    return WorkloadError(f"{path}, line {line}: {problem}")


def json_objects(path: str, text: str, at_most: int | None = None) -> list[dict[str, Any]]:
    """Returns the JSON objects of all lines, or of the first `at_most` lines. Raises WorkloadError for a line without a JSON object."""
    records = []
    for number, line in enumerate(text.removesuffix("\n").split("\n")[:at_most], start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            problem = f"{shorten(repr(line))} is not JSON ({error})"
            raise at_line(path, number, f"{problem}; every line must be a JSON object") from None
        if not isinstance(value, dict):
            raise at_line(path, number, f"{shorten(repr(line))} is not a JSON object, as every line must be")
        records.append(value)
    return records
