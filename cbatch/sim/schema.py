"""The JSON form of the numbers and tables in a profile's file, which pydantic reads and writes.

    Annotated[PiecewiseLinear, TableColumns("tokens")]        {"tokens": [1, 128], "seconds": [0.005, 0.007]}
    Annotated[BilinearGrid, Grid("sizes", "contexts")]   {"sizes": [16], "contexts": [0, 1024], "seconds": [[1e-6, null]]}

Every number is checked on reading, so that a damaged file raises an error instead of giving a strange result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.validation import Give, whole

LARGEST = 1e30
"""Positive numbers must lie between 1 / LARGEST and LARGEST, so that their products and quotients remain finite."""

NOISE, SLOWEST_LINK, LEAST_MESSAGE = 0.5, 5e7, 1e6
"""Least ratio of a message's time to the time of any smaller message; least bytes/s; bytes below which latency dominates."""

_number = partial(core_schema.float_schema, le=LARGEST, allow_inf_nan=False, strict=True)

Positive = Annotated[float, Give(f"a number above 0 (from {1 / LARGEST} to {LARGEST})", _number(ge=1 / LARGEST))]
NotNegative = Annotated[float, Give(f"a number of at least 0 (at most {LARGEST})", _number(ge=0.0))]


def _between(least: float, most: float, unit: str) -> Give:
    """Annotates a number in the range of real hardware, so that a slip of units is refused."""
    return Give(f"{unit}, from {least:g} to {most:g}", _number(ge=least, le=most))


Bytes = Annotated[float, _between(1e8, 1e14, "bytes")]
BytesPerSecond = Annotated[float, _between(1e8, 1e15, "bytes/s")]
FlopsPerSecond = Annotated[float, _between(1e8, 1e18, "operations/s")]
"""A thread of a CPU without 16-bit units computes about 1e9."""
HostSeconds = Annotated[float, _between(0.0, 0.25, "seconds of an iteration")]
"""Planning and launching take microseconds to some tens of milliseconds."""

_Sizes = Annotated[list[Positive], Field(min_length=1)]
BlockSize = Annotated[int, whole(1, 2**31 - 1, "number of tokens")]
NumLayers = Annotated[int, whole(1, unit="number of layers")]
NumGpus = Annotated[int, Give("a number of GPUs", core_schema.int_schema(ge=1))]
"""A key of a JSON object, and therefore a string in the file."""


@dataclass(frozen=True)
class TableColumns:
    """Annotates a `PiecewiseLinear` with the keys of its sizes and values. positive: no value may be 0.

    link: the values are seconds of messages, which must be plausible; see `_check_link`.
    """

    sizes: str
    values: str = "seconds"
    positive: bool = False
    link: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        values: Any = list[Positive] if self.positive else list[NotNegative]
        return _object(handler, {self.sizes: _Sizes, self.values: values}, self._read, self._write)

    def _read(self, lists: dict[str, list[float]]) -> PiecewiseLinear:
        sizes, values = lists[self.sizes], lists[self.values]
        check_ascending(self.sizes, sizes)
        check_length(self.values, values, self.sizes, sizes)
        if self.link:
            _check_link(sizes, values)
        return PiecewiseLinear(tuple(sizes), tuple(values))

    def _write(self, table: PiecewiseLinear) -> dict[str, Any]:
        return {self.sizes: _whole_numbers(table.sizes), self.values: list(table.seconds)}


@dataclass(frozen=True)
class Grid:
    """Annotates a `BilinearGrid` with the keys of its sizes and columns; an unmeasured point is null."""

    sizes: str
    columns: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        lists = {self.sizes: _Sizes, self.columns: list[NotNegative], "seconds": list[list[NotNegative | None]]}
        return _object(handler, lists, self._read, self._write)

    def _read(self, lists: dict[str, Any]) -> BilinearGrid:
        sizes, columns, rows = lists[self.sizes], lists[self.columns], lists["seconds"]
        check_ascending(self.sizes, sizes)
        check_ascending(self.columns, columns)
        check_length("seconds", rows, self.sizes, sizes)
        points = []
        for row in rows:
            check_length("a row of seconds", row, self.columns, columns)
            points.append([(column, value) for column, value in zip(columns, row, strict=True) if value is not None])
        if not all(points):
            raise ValueError("seconds: give at least one number in every row")
        known, seconds = (tuple(tuple(point[part] for point in row) for row in points) for part in (0, 1))
        return BilinearGrid(tuple(sizes), known, seconds)

    def _write(self, grid: BilinearGrid) -> dict[str, Any]:
        columns = sorted({column for row in grid.columns for column in row})
        rows = [dict(zip(*row, strict=True)) for row in zip(grid.columns, grid.seconds, strict=True)]
        seconds = [[row.get(column) for column in columns] for row in rows]
        return {self.sizes: _whole_numbers(grid.sizes), self.columns: _whole_numbers(columns), "seconds": seconds}


def check_ascending(key: str, sizes: Sequence[float]) -> None:
    """Raises ValueError unless sizes are ascending. Pydantic reports the place in the file."""
    if any(later <= size for size, later in pairwise(sizes)):
        raise ValueError(f"{key} must be ascending")


def _check_link(sizes: Sequence[float], seconds: Sequence[float]) -> None:
    """Raises ValueError if times fall as messages grow, or look like milliseconds."""
    if any(later < NOISE * most for later, most in zip(seconds, accumulate(seconds, max), strict=True)):
        raise ValueError("seconds must not fall as bytes grow")
    if seconds[-1] * SLOWEST_LINK > max(sizes[-1], LEAST_MESSAGE):
        slow = f"{sizes[-1]:g} bytes take {seconds[-1]:g} s"
        raise ValueError(f"{slow}, less than {SLOWEST_LINK:g} bytes/s; give seconds")


def check_length(key: str, values: Sequence[Any], sizes_key: str, sizes: Sequence[Any]) -> None:
    """Raises ValueError unless there is a value for every size."""
    if len(values) != len(sizes):
        raise ValueError(f"{key} has {len(values)} values for {len(sizes)} {sizes_key}")


def _object(
    handler: GetCoreSchemaHandler, lists: dict[str, Any], read: Callable[[Any], Any], write: Callable[[Any], Any]
) -> CoreSchema:
    fields = {key: core_schema.typed_dict_field(handler.generate_schema(kind)) for key, kind in lists.items()}
    content = core_schema.typed_dict_schema(fields, extra_behavior="forbid")
    serialization = core_schema.plain_serializer_function_ser_schema(write)
    return core_schema.no_info_after_validator_function(read, content, serialization=serialization)


def _whole_numbers(sizes: Sequence[float]) -> list[float]:
    """Writes whole numbers without a decimal point."""
    return [int(size) if size == int(size) else size for size in sizes]
