"""Tables of CSV and JSON-lines files, read and checked by pandas; errors name the file, the line and the column.

pandas is imported by the first file that is read: a run without a trace does not load it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.workloads.readers.source import TextFile, shorten
from experiments.workloads.trace import MOST_TOKENS, Floats, Ints

if TYPE_CHECKING:
    import pandas as pd

WHOLE = r"\s*-?[0-9]{1,18}\s*"
NUMBER = r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*"
_FIX = "correct or remove the line"


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of a file, indexed by line number: unchecked text (CSV) or JSON values; None for a missing key."""

    file: TextFile
    rows: "pd.DataFrame"

    @property
    def line(self) -> Ints:
        return self.rows.index.to_numpy(np.int64)

    def whole_numbers(
        self, name: str, least: int = -(2**62), most: int = 2**62, problem: str = "must be a whole number"
    ) -> Ints:
        """A column of whole numbers, [rows]. Raises WorkloadError, naming the first line that is out of range."""
        text = self.rows[name].astype(str)
        whole = text.str.fullmatch(WHOLE)
        numbers = text.where(whole, "0").astype(np.int64)
        self.refuse(~(whole & numbers.between(least, most)), problem, name)
        return np.asarray(numbers)

    def token_counts(self, name: str) -> Ints:
        """A column of lengths. A length of 0 is refused: such a request cannot be served, and no source has one."""
        return self.whole_numbers(name, 1, MOST_TOKENS, "must be a whole number of tokens, at least 1")

    def amounts(self, name: str) -> Floats:
        """A column of finite numbers of at least 0, [rows]. Raises WorkloadError as above."""
        text = self.rows[name].astype(str)
        numbers = text.where(text.str.fullmatch(NUMBER)).astype(np.float64)
        self.refuse(~np.isfinite(numbers), "must be a finite number", name)
        self.refuse(numbers < 0, "must not be negative", name)
        return np.asarray(numbers, np.float64)

    def times(self, name: str) -> Floats:
        """A column of wall-clock times (UTC unless they name a zone), as seconds from the first row, [rows]."""
        import pandas as pd

        times = pd.to_datetime(self.rows[name], format="ISO8601", errors="coerce", utc=True)
        self.refuse(times.isna(), "must be a time such as 2023-11-16 18:15:46.6805900", name)
        microseconds = np.asarray(times.dt.tz_localize(None), "datetime64[us]").astype(np.int64)
        return np.asarray((microseconds - microseconds[0]) / 1e6, np.float64)

    def refuse(self, bad: "pd.Series[bool] | NDArray[np.bool_]", problem: str, name: str | None = None) -> None:
        """Raise WorkloadError for the first bad row, quoting its value in column `name`, or else the whole line."""
        if not bad.any():
            return
        row = int(np.argmax(bad))
        line = int(self.line[row])
        if name is None:
            raise self.file.fail(line, f"{shorten(self.file.lines[line - 1])}: {problem}; {_FIX}")
        value = self.rows[name].iloc[row]
        what = f"{name} is missing" if value is None else f"{name}={shorten(value)}"
        raise self.file.fail(line, f"{what}: {problem}; {_FIX}")


def read_csv(file: TextFile, names: Sequence[str]) -> Table:
    """The named columns of a CSV file with a header; others are not read. A quoted field must end on its line.

    Raises:
        WorkloadError: a missing column, a line that does not have as many fields as the header, or no lines below it.
    """
    import pandas as pd

    _check_fields(file)
    try:
        as_text: dict[str, Any] = {"dtype": str, "na_filter": False, "skip_blank_lines": False}
        rows = pd.read_csv(StringIO(file.text), usecols=lambda name: name in names, **as_text)
    except ValueError as error:
        raise file.fail(1, f"not CSV ({' '.join(str(error).split())}): give a file of this format") from None
    for name in names:
        if name not in rows:
            remedy = f"give a file of this format, or another {file.section}.format"
            raise file.fail(1, f"no column {name!r} in {shorten(file.lines[0])}: {remedy}")
    if rows.empty:
        raise file.fail(1, "a header and no rows: give a trace with requests")
    rows.index += 2  # line numbers
    return Table(file, rows)


def header_of(file: TextFile) -> list[str]:
    """The names of the columns of a CSV file."""
    return [name.strip('"') for name in file.lines[0].split(",")]


def _check_fields(file: TextFile) -> None:
    """Raise WorkloadError for a line whose number of fields is not the header's: pandas pads short lines silently."""
    bare = [re.sub(r'"[^"]*"', "quoted", line) for line in file.lines] if '"' in file.text else file.lines
    counts = [line.count(",") + (line != "") for line in bare]
    for number, (line, count) in enumerate(zip(bare, counts, strict=True), start=1):
        if '"' in line:
            raise file.fail(number, f"{shorten(file.lines[number - 1])} is not CSV (quote not closed): {_FIX}")
        if count != counts[0]:
            counted = f"has {count} fields, the header has {counts[0]}"
            raise file.fail(number, f"{shorten(file.lines[number - 1])} {counted}: {_FIX}")


def read_json_lines(file: TextFile, names: Sequence[str]) -> Table:
    """The named keys of a file with a JSON object on every line. Raises WorkloadError for a line that holds none."""
    import pandas as pd

    objects = json_objects(file)
    columns = {name: [record.get(name) for record in objects] for name in names}
    return Table(file, pd.DataFrame(columns, range(1, len(objects) + 1), dtype=object))


def json_objects(file: TextFile) -> list[dict[str, Any]]:
    """The JSON object of every line. Raises WorkloadError for a line that holds none."""
    records = []
    for line, text in enumerate(file.lines, start=1):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise file.fail(line, f"{shorten(text)} is not JSON{column}: {_FIX}") from None
        if not isinstance(record, dict):
            raise file.fail(line, f"{shorten(text)} is not a JSON object: {_FIX}")
        records.append(record)
    return records
