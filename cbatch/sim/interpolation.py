"""Measured tables, read between their points: linear between neighbours, so that a measured step stays a step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple


class Curve(NamedTuple):
    """Seconds against a size (tokens, requests, bytes), measured at ascending sizes.

    Below the first point the first value holds; beyond the last one the value grows in proportion to the size, as it
    does where throughput has settled. `covers` tells which sizes lie within.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        sizes, seconds = self.sizes, self.seconds
        right = bisect_right(sizes, size)
        if right == len(sizes):
            return seconds[-1] * size / sizes[-1]
        if right == 0:
            return seconds[0]
        left = right - 1
        return seconds[left] + (size - sizes[left]) * (seconds[right] - seconds[left]) / (sizes[right] - sizes[left])

    def covers(self, size: float) -> bool:
        return size <= self.sizes[-1]

    def scaled(self, factor: float) -> Curve:
        return Curve(self.sizes, tuple(value * factor for value in self.seconds))


class Grid(NamedTuple):
    """Seconds against two sizes: a row of (column, seconds) points for each value of the first size.

    Rows may be of different lengths. Beyond a row's last column its mean slope goes on; beyond the last row the value
    grows in proportion; below the first row, likewise, the first row holds.
    """

    sizes: tuple[float, ...]
    columns: tuple[tuple[float, ...], ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, size: float, column: float) -> float:
        sizes = self.sizes
        right = bisect_right(sizes, size)
        if right == len(sizes):
            return self._along(right - 1, column) * size / sizes[-1]
        if right == 0:
            return self._along(0, column)
        left = right - 1
        low = self._along(left, column)
        if size == sizes[left]:
            return low
        return low + (size - sizes[left]) * (self._along(right, column) - low) / (sizes[right] - sizes[left])

    def covers(self, size: float, column: float) -> bool:
        """Whether both the rows and the row next below reach that far."""
        sizes = self.sizes
        return size <= sizes[-1] and column <= self.columns[max(bisect_right(sizes, size) - 1, 0)][-1]

    def rectangle(self) -> tuple[float, float]:
        """The size and column up to which everything is covered: the largest such rectangle."""
        reach = accumulate((columns[-1] for columns in self.columns), min)
        return max(zip(self.sizes, reach, strict=True), key=lambda corner: corner[0] * corner[1])

    def _along(self, row: int, column: float) -> float:
        columns, seconds = self.columns[row], self.seconds[row]
        right = bisect_right(columns, column)
        if 0 < right < len(columns):
            left = right - 1
            share = (column - columns[left]) / (columns[right] - columns[left])
            return seconds[left] + share * (seconds[right] - seconds[left])
        if right:
            slope = (seconds[-1] - seconds[0]) / (columns[-1] - columns[0]) if len(columns) > 1 else 0.0
            return seconds[-1] + (column - columns[-1]) * max(slope, 0.0)
        return seconds[0]


def curve(points: Iterable[tuple[float, float]]) -> Curve:
    """A curve through (size, seconds) points in any order; the mean where a size was measured more than once."""
    merged = _mean_by_size(points)
    return Curve(tuple(merged), tuple(merged.values()))


def grid(points: Iterable[tuple[float, float, float]]) -> Grid:
    """A grid through (size, column, seconds) points in any order; the mean where a pair was measured more than once."""
    rows = {
        size: _mean_by_size((column, seconds) for _, column, seconds in group)
        for size, group in groupby(sorted(points), key=lambda point: point[0])
    }
    return Grid(
        tuple(rows), tuple(tuple(row) for row in rows.values()), tuple(tuple(row.values()) for row in rows.values())
    )


def added(curves: Sequence[Curve]) -> Curve:
    """The sum of curves that were measured at the same sizes."""
    first = curves[0]
    assert all(curve.sizes == first.sizes for curve in curves), "curves of one table share their sizes"
    return Curve(first.sizes, tuple(sum(values) for values in zip(*(curve.seconds for curve in curves), strict=True)))


def _mean_by_size(points: Iterable[tuple[float, float]]) -> Mapping[float, float]:
    groups = groupby(sorted(points), key=lambda point: point[0])
    values = {size: [seconds for _, seconds in group] for size, group in groups}
    return {size: sum(found) / len(found) for size, found in values.items()}
