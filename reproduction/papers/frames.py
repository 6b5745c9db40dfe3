"""Tables of figures: selecting and pivoting rows, and reading what benchmarks have measured on a GPU."""

import json
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import pandas as pd

from reproduction import RESULTS

FOLDER = Path(__file__).parents[2] / RESULTS / "h200"
PROVENANCE = ("benchmark", "command", "date", "commit", "hardware", "versions")
P = ParamSpec("P")
Row = tuple[Any, ...]


def data_frame(*columns: str) -> Callable[[Callable[P, Iterable[Row]]], Callable[P, pd.DataFrame]]:
    """Decorates a function that yields rows: it returns a table with these columns."""

    def decorate(rows: Callable[P, Iterable[Row]]) -> Callable[P, pd.DataFrame]:
        @wraps(rows)
        def measure(*args: P.args, **kwargs: P.kwargs) -> pd.DataFrame:
            return pd.DataFrame(list(rows(*args, **kwargs)), columns=list(columns))

        return measure

    return decorate


def select(data: pd.DataFrame, **values: object) -> pd.DataFrame:
    """The rows whose columns have these values."""
    for column, value in values.items():
        data = data[data[column] == value]
    return data


def pivot(data: pd.DataFrame, index: str | list[str], columns: str = "series", values: str = "value") -> pd.DataFrame:
    """A column for each value of `columns` and a row for each of `index`, in order of appearance."""
    return data.pivot_table(index=index, columns=columns, values=values, sort=False)


def add_provenance(data: pd.DataFrame, *files: dict[str, Any]) -> pd.DataFrame:
    """Attach command, date, commit, hardware and versions of results files to `data`; the figure's own file repeats them."""
    data.attrs["measured"] = [{key: file[key] for key in PROVENANCE if key in file} for file in files]
    return data


def read_stored(name: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the results file of a benchmark; empty without the file, after saying what writes it."""
    path = FOLDER / f"{name}.json"
    if path.is_file():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    say(f"left out: {RESULTS}/h200/{path.name} is missing; python -m reproduction.bench {name} writes it, on a GPU")
    return {}
