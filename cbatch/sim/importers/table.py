"""Reads columns of a CSV file, plain or gzip-compressed, and checks every number."""

import csv
import gzip
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import islice, repeat
from operator import itemgetter
from pathlib import Path
from typing import NoReturn, TextIO, TypeVar

from cbatch.errors import ProfileError
from cbatch.sim.checked_json import LARGEST
from cbatch.sim.interpolation import PiecewiseLinear

Names = Sequence[str]
Labels = tuple[str, ...]
Numbers = tuple[float, ...]
T = TypeVar("T")

UNREADABLE = (OSError, EOFError, ValueError, zlib.error, csv.Error)
"""Exceptions from reading a damaged file."""


def read_table(
    path: Path, columns: Names, labels: Names = (), optional: Names = (), above_zero: Names = ()
) -> Iterator[tuple[Labels, Numbers]]:
    """Yields for each row the `labels` columns as text and the named `columns` as numbers, at least 0.

    An empty field of an `optional` column is NaN. `above_zero`: columns that must not contain 0.

    Raises:
        ProfileError: unreadable file, missing column or invalid number; the message names file and line.
    """
    texts, numbers = _columns(path, labels, columns)
    named = zip(columns, numbers, strict=True)
    checked = [_checked(path, name, column, name in optional, name in above_zero) for name, column in named]
    return zip(zip(*texts, strict=True) if texts else repeat(()), zip(*checked, strict=True), strict=False)


class FirstRow:
    """The first row of a file, for values that are the same in all rows."""

    def __init__(self, path: Path) -> None:
        """Raises ProfileError if there is none."""
        self.path = path
        try:
            with _opened(path) as file:
                row = next(iter(csv.DictReader(file)), None)
        except UNREADABLE as error:
            raise _unreadable(path, error) from error
        if row is None:
            raise ProfileError(f"{path}: holds no rows; fetch the file again")
        self._row = row

    def text(self, name: str) -> str:
        return self._row.get(name) or _fail(self.path, 2, f"{name} is missing")

    def whole(self, name: str) -> int:
        text = self.text(name)
        if not text.isdecimal() or not 0 < int(text) < LARGEST:
            _fail(self.path, 2, f"{name} must be a whole number of at least 1, is {text!r:.40}")
        return int(text)


def some(path: Path, points: Iterable[T], what: str) -> list[T]:
    """The points as a list. Raises ProfileError if there are none."""
    found = list(points)
    if not found:
        raise ProfileError(f"{path}: holds no rows of {what}; fetch the file again")
    return found


def summed(path: Path, curves: Sequence[PiecewiseLinear]) -> PiecewiseLinear:
    """The sum of the file's curves. Raises ProfileError where they do not share their sizes."""
    if any(curve.sizes != curves[0].sizes for curve in curves):
        raise ProfileError(f"{path}: parts of one sum were measured at different sizes; fetch the file again")
    return PiecewiseLinear.sum(curves)


def only_file(folder: Path, pattern: str) -> Path:
    """The file of a folder that matches; the newest by name, if there are several. Raises ProfileError if there is none."""
    found = sorted(folder.glob(pattern))
    if not found:
        raise ProfileError(f"{folder}: no file {pattern}; give the folder as it was published")
    return found[-1]


def _columns(path: Path, *groups: Sequence[str]) -> list[list[tuple[str, ...]]]:
    """The texts of groups of columns; other columns are dropped while reading."""
    rows: list[tuple[str, ...]] = []
    try:
        with _opened(path) as file:
            lines = _fields(file.read())
        header = next(lines, [])
        places = [_place(path, header, name) for group in groups for name in group]
        pick = itemgetter(*places, *places[:1])  # one extra: itemgetter of a single place returns no tuple
        rows.extend(map(pick, lines))
    except IndexError:
        _fail(path, len(rows) + 2, "has fewer fields than the header")
    except UNREADABLE as error:
        raise _unreadable(path, error) from error
    if not rows:
        raise ProfileError(f"{path}: holds no rows; fetch the file again")
    columns = zip(*rows, strict=True)
    return [list(islice(columns, len(group))) for group in groups]


def _fields(text: str) -> Iterator[list[str]]:
    """The fields of each line; without quotes, splitting at commas takes half the time of csv.reader."""
    if '"' in text:
        return csv.reader(text.splitlines())
    return (line.split(",") for line in text.splitlines())


def _opened(path: Path) -> TextIO:
    try:
        return gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="")
    except OSError as error:
        raise ProfileError(f"{path}: cannot read the table: {error.strerror}") from error


def _unreadable(path: Path, error: Exception) -> ProfileError:
    return ProfileError(f"{path}: cannot read the table: {error}; fetch the file again")


def _place(path: Path, header: list[str], name: str) -> int:
    if name not in header:
        near = get_close_matches(name, header, 1)
        hint = f"; found {near[0]}" if near else ""
        raise ProfileError(f"{path}: column {name} is missing{hint}; fetch the file again")
    return header.index(name)


def _checked(path: Path, name: str, texts: Sequence[str], may_be_empty: bool, above_zero: bool) -> list[float]:
    filled = set(texts) - {""} if may_be_empty else set(texts)  # values recur: each is parsed once
    try:
        numbers = dict(zip(filled, map(float, filled), strict=True))
    except ValueError:
        numbers = {"": math.nan}
    least, values = 1 / LARGEST if above_zero else 0.0, numbers.values()
    if numbers and not (math.isfinite(sum(values)) and min(values) >= least and max(values) <= LARGEST):
        _name_the_line(path, name, texts, may_be_empty, least)
    numbers.setdefault("", math.nan)
    return list(map(numbers.__getitem__, texts))


def _name_the_line(path: Path, name: str, texts: Sequence[str], may_be_empty: bool, least: float) -> NoReturn:
    for line, text in enumerate(texts, 2):
        try:
            sound = least <= float(text) <= LARGEST
        except ValueError:
            sound = may_be_empty and not text
        if not sound:
            _fail(path, line, f"{name} must be a number {'above' if least else 'of at least'} 0, is {text!r:.40}")
    raise AssertionError("called for a column with an unsound number")


def _fail(path: Path, line: int, why: str) -> NoReturn:
    raise ProfileError(f"{path}: line {line}: {why}; fetch the file again")
