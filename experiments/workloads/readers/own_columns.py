"""Columns of a trace that its format does not name, read as attributes of the requests.

    workload.columns='{client: user_id, difficulty: score}'

`client`, `session`, `tier`, `priority` and `predicted_new_tokens` fill the field of `RequestSpec`; any other name becomes an
own attribute, `request.extra["difficulty"]`.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from cbatch import RequestSpec, WorkloadError
from cbatch.validation import nearest
from experiments.workloads.readers.source import TextFile
from experiments.workloads.readers.table import NUMBER, WHOLE, Table, header_of, read_csv, read_json_lines
from experiments.workloads.trace import Column

_TEXTS = ("client", "session", "tier")
_NUMBERS = {"priority": -(2**62), "predicted_new_tokens": 1}  # the least of each
_TAKEN = {field.name for field in fields(RequestSpec)}.difference(_TEXTS, _NUMBERS)


def read_own_columns(file: TextFile, columns: Mapping[str, str]) -> dict[str, Column]:
    """Reads the columns of a CSV or JSON-lines file, by the names of attributes; returns fields of a `Trace`.

    In `extra`, a column of numbers in a CSV file becomes numbers, empty values None; JSON values stay as they are.

    Raises:
        WorkloadError: no such column, a name that is a field of another kind, or a value that does not fit its field.
    """
    for name in columns:
        if name in _TAKEN:
            near = nearest(name, [*_TEXTS, *_NUMBERS])
            raise WorkloadError(
                f"workload.columns.{name}: the format fills it; choose another name, or a field: {near}"
            )
    is_json = file.lines[0].startswith("{")
    header = [] if is_json else header_of(file)
    for name, column in columns.items():
        if not is_json and column not in header:
            raise file.fail(1, f"workload.columns.{name}: no column {column!r}; {nearest(column, header)}")
    table = (read_json_lines if is_json else read_csv)(file, list(columns.values()))
    found: dict[str, Column] = {}
    extra: dict[str, list[Any]] = {}
    for name, column in columns.items():
        if all(value is None for value in table.columns[column]):  # JSON lines
            raise file.fail(1, f"workload.columns.{name}: no line has a key {column!r}; name one of this file")
        if name in _NUMBERS:
            found[name] = table.whole_numbers(column, _NUMBERS[name]).astype(object)
        elif name in _TEXTS:
            texts = [None if value in (None, "") else str(value) for value in table.columns[column]]
            found[name] = np.array(texts, object)
        else:
            extra[name] = _values(table, column)
    if extra:
        found["extra"] = np.array([dict(zip(extra, row, strict=True)) for row in zip(*extra.values(), strict=True)])
    return found


def _values(table: Table, column: str) -> list[Any]:
    """Values as they are in JSON; text becomes numbers if all of the column is."""
    values = table.columns[column]
    texts = [value for value in values if value != ""]
    for kind, pattern in ((int, WHOLE), (float, NUMBER)):
        if all(isinstance(text, str) and re.fullmatch(pattern, text) for text in texts):
            return [None if value == "" else kind(value) for value in values]
    return [None if value == "" else value for value in values]
