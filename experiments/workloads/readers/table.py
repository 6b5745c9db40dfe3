"""Tables of CSV and JSON-lines files, read and checked; errors name the file, the line and the column."""

import csv
import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from experiments.workloads.readers.source import TextFile, shorten
from experiments.workloads.trace import MOST_TOKENS, Floats, Ints

WHOLE = r"\s*-?[0-9]{1,18}\s*"
NUMBER = r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*"
_FIX = "correct or remove the line"


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of a file, an entry for each line from `first_line` on: unchecked text (CSV) or JSON values.

    None for a missing key.
    """

    file: TextFile
    columns: Mapping[str, Sequence[Any]]
    first_line: int

    @property
    def line(self) -> Ints:
        num_rows = len(next(iter(self.columns.values())))
        return np.arange(self.first_line, self.first_line + num_rows)

    def whole_numbers(
        self, name: str, least: int = -(2**62), most: int = 2**62, problem: str = "must be a whole number"
    ) -> Ints:
        """A column of whole numbers, [rows]. Raises WorkloadError, naming the first line that is out of range."""
        is_whole = re.compile(WHOLE).fullmatch
        texts = map(str, self.columns[name])
        numbers = np.array([int(text) if is_whole(text) else least - 1 for text in texts], np.int64)
        self.refuse((numbers < least) | (numbers > most), problem, name)
        return numbers

    def token_counts(self, name: str) -> Ints:
        """A column of lengths. A length of 0 is refused: such a request cannot be served, and no source has one."""
        return self.whole_numbers(name, 1, MOST_TOKENS, "must be a whole number of tokens, at least 1")

    def amounts(self, name: str) -> Floats:
        """A column of finite numbers of at least 0, [rows]. Raises WorkloadError as above."""
        is_number = re.compile(NUMBER).fullmatch
        texts = map(str, self.columns[name])
        numbers = np.array([float(text) if is_number(text) else np.nan for text in texts], np.float64)
        self.refuse(~np.isfinite(numbers), "must be a finite number", name)
        self.refuse(numbers < 0, "must not be negative", name)
        return numbers

    def times(self, name: str) -> Floats:
        """A column of wall-clock times (UTC unless they name a zone), as seconds from the first row, [rows]."""
        times = [_read_time(text) for text in self.columns[name]]
        self.refuse([time is None for time in times], "must be a time such as 2023-11-16 18:15:46.6805900", name)
        return np.array([(time - times[0]).total_seconds() for time in times if time and times[0]], np.float64)

    def refuse(self, bad: Iterable[object], problem: str, name: str | None = None) -> None:
        """Raise WorkloadError for the first bad row, quoting its value in column `name`, or else the whole line."""
        row = next((row for row, found in enumerate(bad) if found), None)
        if row is None:
            return
        line = self.first_line + row
        if name is None:
            raise self.file.fail(line, f"{shorten(self.file.lines[line - 1])}: {problem}; {_FIX}")
        value = self.columns[name][row]
        what = f"{name} is missing" if value is None else f"{name}={shorten(value)}"
        raise self.file.fail(line, f"{what}: {problem}; {_FIX}")

    def refuse_repeated(self, keys: Iterable[Hashable], problem: str, name: str | None = None) -> None:
        """The same for the first row whose key an earlier one has."""
        first: dict[Hashable, int] = {}
        self.refuse([first.setdefault(key, row) < row for row, key in enumerate(keys)], problem, name)


def _read_time(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def read_csv(file: TextFile, names: Sequence[str]) -> Table:
    """The named columns of a CSV file with a header; others are not read. A quoted field must end on its line.

    Raises:
        WorkloadError: a missing column, a line that does not have as many fields as the header, or no lines below it.
    """
    _check_fields(file)
    try:
        header, *rows = csv.reader(file.lines)
    except csv.Error as error:
        raise file.fail(1, f"not CSV ({error}); give a file of this format") from None
    for name in names:
        if name not in header:
            remedy = f"this format has {', '.join(names)}; rename the columns, or give another {file.section}.format"
            raise file.fail(1, f"no column {name!r} in {shorten(file.lines[0])}; {remedy}")
    if not rows:
        raise file.fail(1, "a header and no rows; give a trace with requests")
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    return Table(file, {name: columns[name] for name in names}, 2)


def header_of(file: TextFile) -> list[str]:
    """The names of the columns of a CSV file."""
    return [name.strip('"') for name in file.lines[0].split(",")]


def _check_fields(file: TextFile) -> None:
    """Raise WorkloadError for a line whose number of fields is not the header's."""
    bare = [re.sub(r'"[^"]*"', "quoted", line) for line in file.lines] if '"' in file.text else file.lines
    counts = [line.count(",") + (line != "") for line in bare]
    for number, (line, count) in enumerate(zip(bare, counts, strict=True), start=1):
        if '"' in line:
            raise file.fail(number, f"{shorten(file.lines[number - 1])} is not CSV (quote not closed); {_FIX}")
        if count != counts[0]:
            counted = f"has {count} field{'s' * (count != 1)}, the header has {counts[0]}"
            raise file.fail(number, f"{shorten(file.lines[number - 1])} {counted}; {_FIX}")


def read_json_lines(file: TextFile, names: Sequence[str]) -> Table:
    """The named keys of a file with a JSON object on every line. Raises WorkloadError for a line that holds none."""
    objects = json_objects(file)
    return Table(file, {name: [record.get(name) for record in objects] for name in names}, 1)


def json_objects(file: TextFile) -> list[dict[str, Any]]:
    """The JSON object of every line. Raises WorkloadError for a line that holds none."""
    records = []
    for line, text in enumerate(file.lines, start=1):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise file.fail(line, f"{shorten(text)} is not JSON{column}; {_FIX}") from None
        if not isinstance(record, dict):
            raise file.fail(line, f"{shorten(text)} is not a JSON object; {_FIX}")
        records.append(record)
    return records
