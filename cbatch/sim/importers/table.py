"""Reads columns of a CSV file, plain or gzip-compressed, and checks every number."""

import csv
import gzip
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import islice, repeat
from pathlib import Path
from typing import NoReturn, TypeVar

from cbatch.errors import ProfileError
from cbatch.sim.checked_json import LARGEST
from cbatch.sim.interpolation import PiecewiseLinear

Names = Sequence[str]
Labels = tuple[str, ...]
Numbers = tuple[float, ...]
T = TypeVar("T")


def read_table(
    path: Path,
    columns: Names,
    labels: Names = (),
    optional: Names = (),
    above_zero: Names = (),
    num_rows: int | None = None,
) -> Iterator[tuple[Labels, Numbers]]:
    """Yields for each row the `labels` columns as text and the named `columns` as numbers, at least 0.

    An empty field of an `optional` column is NaN. `above_zero`: columns that must not contain 0. `num_rows`: to read.

    Raises:
        ProfileError: unreadable file, missing column or invalid number; the message names file and line.
    """
    read = _read(path, [*labels, *columns], num_rows)
    numbers = [_numbers(path, name, read[name], name in optional, name in above_zero) for name in columns]
    for name in labels:
        if "" in read[name]:
            _fail(path, read[name].index(""), f"{name} is missing")
    texts = zip(*(read[name] for name in labels), strict=True) if labels else repeat(())
    return zip(texts, zip(*numbers, strict=True), strict=False)


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
    """The file of a folder that matches, of several the newest by name. Raises ProfileError if there is none."""
    found = sorted(folder.glob(pattern))
    if not found:
        raise ProfileError(f"{folder}: no file {pattern}; give the folder as it was published")
    return found[-1]


def _read(path: Path, names: Names, num_rows: int | None) -> dict[str, Names]:
    """The named columns as text; a field that its row lacks is empty."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            _check_columns(path, names, header)
            places = [header.index(name) for name in names]
            rows = ([row[place] if place < len(row) else "" for place in places] for row in islice(lines, num_rows))
            columns = list(zip(*rows, strict=True))
    except (OSError, EOFError, ValueError, csv.Error, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise ProfileError(f"{path}: cannot read the table: {reason}; fetch the file again") from error
    if not columns:
        raise ProfileError(f"{path}: holds no rows; fetch the file again")
    return dict(zip(names, columns, strict=True))


def _check_columns(path: Path, names: Names, header: Names) -> None:
    for name in names:
        if name not in header:
            near = get_close_matches(name, header, 1)
            hint = f"; found {near[0]}" if near else ""
            raise ProfileError(f"{path}: column {name} is missing{hint}; fetch the file again")


def _numbers(path: Path, name: str, texts: Sequence[str], optional: bool, above_zero: bool) -> list[float]:
    """The numbers of a column. Values recur: each is parsed once."""
    least, known = 1 / LARGEST if above_zero else 0.0, {"": math.nan} if optional else {}
    for text in dict.fromkeys(texts):
        if text in known:
            continue
        try:
            known[text] = float(text)
        except ValueError:
            known[text] = math.nan
        if not least <= known[text] <= LARGEST:
            bound = "above" if above_zero else "of at least"
            _fail(path, texts.index(text), f"{name} must be a number {bound} 0, is {text!r:.40}")
    return list(map(known.__getitem__, texts))


def _fail(path: Path, row: int, why: str) -> NoReturn:
    raise ProfileError(f"{path}: line {row + 2}: {why}; fetch the file again")
