"""Columns of CSV and JSON-lines files; what is wrong with a value is told with its file, line and name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from csv import Error as CSVError
from csv import reader as csv_reader
from typing import Any, TypeVar

import numpy as np

from experiments.workloads.readers import fields
from experiments.workloads.readers.source import TextFile
from experiments.workloads.trace import MOST_TOKENS, Ints

T = TypeVar("T")


def convert(file: TextFile, line: int, name: str, value: object, converter: Callable[[object], T]) -> T:
    """One value. Raises WorkloadError, naming file, line and column."""
    try:
        return converter(value)
    except ValueError as error:
        what = f"{name} is missing" if value is None else f"{name}={_short(value)}"
        raise file.fail(line, f"{what}: {error}; correct or remove the line") from None


def column(
    file: TextFile, name: str, values: Sequence[object], converter: Callable[[object], T], first_line: int
) -> list[T]:
    """One value after another, of lines `first_line` on. Raises WorkloadError, naming file, line and column."""
    try:
        return [converter(value) for value in values]
    except ValueError:  # which line it is, is asked only then
        return [convert(file, line, name, value, converter) for line, value in enumerate(values, first_line)]


def token_counts(file: TextFile, name: str, texts: Sequence[str]) -> Ints:
    """A column of lengths below a header, [lines]. Raises WorkloadError, naming file, line and column."""
    try:
        counts = list(map(int, texts)) if "".join(texts).isdecimal() else []
    except ValueError:  # one is empty, or of thousands of digits
        counts = []
    if not counts or min(counts) < 1 or max(counts) > MOST_TOKENS:
        counts = column(file, name, texts, fields.token_count, first_line=2)
    return np.array(counts)


def csv_columns(file: TextFile, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The named columns of a CSV file, whose header is line 1; other columns are left alone.

    Raises:
        WorkloadError: a column is missing, a line has another number of fields than the header, or no line follows it.
    """
    header, *rows = _csv_rows_at_once(file) or _csv_rows(file)
    for name in names:
        if name not in header:
            raise file.fail(
                1,
                f"no column {name!r} in {_short(file.lines[0])}: give a file of this format, "
                "or another workload.format",
            )
    if not rows:
        raise file.fail(1, "a header and no rows: give a trace with requests")
    for line, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise file.fail(
                line,
                f"{_short(file.lines[line - 1])} has {len(row)} fields, the header {len(header)}: "
                "correct or remove the line",
            )
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    return {name: columns[name] for name in names}


def _csv_rows_at_once(file: TextFile) -> list[list[str]]:
    """The fields of each line; none where a quoted field might span lines, or something is wrong."""
    if any('"' in line for line in file.lines):
        return []
    try:
        return list(csv_reader(file.lines, strict=True))
    except CSVError:
        return []


def _csv_rows(file: TextFile) -> Iterator[list[str]]:
    """The fields of each line; a quoted field may not span lines, so that lines can be counted."""
    for line, text in enumerate(file.lines, start=1):
        try:
            yield next(csv_reader([text], strict=True), [])
        except CSVError as error:
            raise file.fail(line, f"{_short(text)} is not CSV ({error}): correct or remove the line") from None


def json_objects(file: TextFile) -> list[dict[str, Any]]:
    """The JSON object of every line. Raises WorkloadError for a line that holds none."""
    records = []
    for line, text in enumerate(file.lines, start=1):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise file.fail(line, f"{_short(text)} is not JSON{column}: correct or remove the line") from None
        if not isinstance(record, dict):
            raise file.fail(line, f"{_short(text)} is not a JSON object: correct or remove the line")
        records.append(record)
    return records


def _short(value: object) -> str:
    """The value as it fits into a one-line message."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
