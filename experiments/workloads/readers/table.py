"""Tables of CSV and JSON-lines files, as pandas reads them; errors name the file, the line and the column."""

from collections.abc import Hashable
from dataclasses import dataclass
from decimal import Decimal
from io import StringIO
from typing import Any

import numpy as np
import pandas as pd

from cbatch import WorkloadError
from cbatch.validation import nearest, shorten
from experiments.workloads.readers.source import at_line, json_objects
from experiments.workloads.trace import Floats, Ints


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of a file.

    path: of the file. frame: text (CSV) or JSON values, None for a missing key; the index is the line of each row.
    """

    path: str
    frame: pd.DataFrame

    def column(self, name: str, key: str = "") -> "pd.Series[Any]":
        """Returns a column. key: the setting that names it, for messages. Raises WorkloadError if there is none."""
        if name not in self.frame:
            raise WorkloadError(f"{self.path}: {key}no column {name!r}; {shorten(nearest(name, [*self.frame]))}")
        return self.frame[name]

    def amounts(self, name: str) -> Floats:
        """Returns a column of finite numbers, [rows]. Raises WorkloadError, naming the first line that has none."""
        numbers = pd.to_numeric(self.column(name).map(str), errors="coerce").to_numpy(np.float64)
        self.refuse(~np.isfinite(numbers), name, "must be a finite number")
        return numbers

    def since_first(self, name: str) -> Floats:
        """Returns a column of numbers less the first, [rows], exactly also where they are large. Raises WorkloadError as `amounts`."""
        self.amounts(name)
        numbers = [Decimal(str(value)) for value in self.frame[name]]
        return np.array([float(number - numbers[0]) for number in numbers])

    def whole_numbers(self, name: str, least: int = -(2**62), most: int = 2**62, unit: str = "") -> Ints:
        """Returns a column of whole numbers of this range, [rows]. Raises WorkloadError as `amounts`."""
        numbers = pd.to_numeric(self.column(name).map(str), errors="coerce")
        limit = f", at least {least}" if least >= 0 else ""
        self.refuse(~(numbers.between(least, most) & (numbers % 1 == 0)), name, f"must be a whole number{unit}{limit}")
        return numbers.to_numpy(np.int64)

    def times(self, name: str) -> Floats:
        """Returns a column of wall-clock times (UTC unless they name a zone), to 1 us, as seconds from the first row, [rows]."""
        times = pd.to_datetime(self.column(name), errors="coerce", utc=True, format="ISO8601").dt.floor("us")
        self.refuse(times.isna(), name, "must be a time such as 2023-11-16 18:15:46.6805900")
        return np.asarray((times - times.iloc[0]) // pd.Timedelta("1us"), np.float64) / 1e6

    def refuse(self, bad: Any, name: str, problem: str) -> None:
        """Raises WorkloadError for the first row that is bad, if one is. bad: [rows]. name: of the column to quote."""
        if (rows := np.flatnonzero(bad)).size:
            value = shorten(repr(self.frame[name].iloc[rows[0]]))
            raise at_line(
                self.path, self.frame.index[rows[0]], f"{name}={value}: {problem}; correct or remove the line"
            )


def parse_table(path: str, text: str) -> Table:
    """Returns the table of a CSV file with a header, or of a file with a JSON object on every line.

    Raises:
        WorkloadError: the text is neither, or has no rows.
    """
    if text.lstrip().startswith("{"):
        rows = json_objects(path, text)
        names = dict.fromkeys(name for row in rows for name in row)
        values = {name: pd.Series([row.get(name) for row in rows], dtype=object) for name in names}
        return Table(path, pd.DataFrame(values).set_axis(range(1, 1 + len(rows))))
    try:
        lines = pd.read_csv(StringIO(text), header=None, dtype=str, keep_default_na=False, skip_blank_lines=False)
    except ValueError as error:
        raise WorkloadError(
            f"{path}: is not CSV ({' '.join(str(error).split())}); give a CSV or JSON-lines file"
        ) from None
    header: list[Hashable] = lines.iloc[0].tolist()
    frame = lines.set_axis(header, axis="columns").set_axis(range(1, 1 + len(lines)))[1:]
    if frame.empty:
        raise at_line(path, 1, f"{shorten(header)} is a header without rows; give a file with requests")
    return Table(path, frame.loc[:, ~frame.columns.duplicated()])
