"""Reads columns of published CSV files, plain or gzip-compressed, and checks every number."""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from cbatch.errors import ConfigError, ProfileError
from cbatch.model import ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.sim.schema import LARGEST

DEGREES = (1, 2, 4, 8)
"""Tensor-parallel degrees that are looked for."""


def read_columns(
    path: Path,
    columns: Sequence[str],
    labels: Sequence[str] = (),
    optional: Sequence[str] = (),
    above_zero: Sequence[str] = (),
) -> pd.DataFrame:
    """Returns the `labels` columns as text and the named `columns` as numbers of at least 0.

    optional: columns whose empty fields are NaN. above_zero: columns that must not contain 0.

    Raises:
        ProfileError: unreadable file, missing column or invalid number; the message names file and line.
    """
    try:
        text = pd.read_csv(path, dtype=str, keep_default_na=False, skip_blank_lines=False)
    except (OSError, EOFError, ValueError, zlib.error) as error:  # pandas' own errors are ValueErrors
        raise ProfileError(f"{path}: cannot read the table: {' '.join(str(error).split())}; fetch it again") from None
    if not isinstance(text.index, pd.RangeIndex):
        raise ProfileError(f"{path}: line 2: has more cells than columns; fetch the file again")
    if missing := [name for name in (*labels, *columns) if name not in text]:
        raise ProfileError(f"{path}: column {missing[0]} is missing; fetch the file again")
    if text.empty:
        raise ProfileError(f"{path}: holds no rows; fetch the file again")
    numbers = text[[*columns]].apply(pd.to_numeric, errors="coerce").astype(float)
    for name in columns:
        least, bound = (1 / LARGEST, "above") if name in above_zero else (0.0, "of at least")
        valid = numbers[name].between(least, LARGEST) | ((text[name] == "") & (name in optional))
        if not valid.all():
            row = int(valid.to_numpy().argmin())
            problem = f"{name} must be a number {bound} 0, is {text[name][row]!r:.40}"
            raise ProfileError(f"{path}: line {row + 2}: {problem}; fetch the file again")
    return text[[*labels]].join(numbers)


def curve(path: Path, what: str, sizes: pd.Series, seconds: pd.Series) -> PiecewiseLinear:
    """Returns seconds against sizes. Raises ProfileError if nothing was measured."""
    return PiecewiseLinear.through(_points(path, what, sizes, seconds))


def grid(path: Path, what: str, sizes: pd.Series, columns: pd.Series, seconds: pd.Series) -> BilinearGrid:
    """Returns seconds against sizes and columns. Raises ProfileError if nothing was measured."""
    return BilinearGrid.through(_points(path, what, sizes, columns, seconds))


def _points(path: Path, what: str, *parts: pd.Series) -> list[Any]:
    points = list(zip(*(part.tolist() for part in parts), strict=True))
    if not points or parts[-1].isna().any():
        raise ProfileError(f"{path}: holds no times of {what}, or rows without one; fetch the file again")
    return points


def split(rows: pd.DataFrame, *names: str) -> Iterator[tuple[tuple[int, ...], pd.DataFrame]]:
    """Yields the rows for each combination of whole numbers in these columns."""
    keys: Any
    for keys, group in rows.groupby([*names]):
        yield tuple(map(int, keys)), group


def add_up(path: Path, curves: Sequence[PiecewiseLinear]) -> PiecewiseLinear:
    """Returns the sum of the file's curves. Raises ProfileError where they do not share their sizes."""
    if any(part.sizes != curves[0].sizes for part in curves):
        raise ProfileError(f"{path}: parts of one sum were measured at different sizes; fetch the file again")
    totals = map(sum, zip(*(part.seconds for part in curves), strict=True))
    return PiecewiseLinear(curves[0].sizes, tuple(totals))


def only_file(folder: Path, pattern: str) -> Path:
    """Returns the file of a folder that matches, of several the newest by name. Raises ProfileError if there is none."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise ProfileError(f"{folder}: no file {pattern}; give the folder as it was published")
    return files[-1]


def shares(spec: ModelSpec) -> dict[int, ModelSpec]:
    """Returns one GPU's share of a model by the tensor-parallel degrees that divide it."""
    found = {}
    for degree in DEGREES:
        try:
            found[degree] = Topology(degree).share(spec)
        except ConfigError:
            continue
    return found
