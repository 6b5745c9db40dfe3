"""Interpolates measured tables linearly between neighbours, so that a measured step remains a step."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, groupby
from math import inf
from typing import NamedTuple, Self

from cbatch.cost import scores


class PiecewiseLinear(NamedTuple):
    """Seconds against a size (tokens, requests, bytes), measured at ascending sizes.

    Below the first size the first value holds. Beyond the last size the value grows in proportion to the size, as with
    saturated throughput.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> "PiecewiseLinear":
        """Returns a table through (size, seconds) points in any order; repeated sizes get the mean."""
        means = _mean_by_size(points)
        return cls(tuple(means), tuple(means.values()))

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
        """Returns whether the size lies within the measured range."""
        return size <= self.sizes[-1]

    def scaled(self, factor: float, fixed: float = 0.0) -> "PiecewiseLinear":
        """Multiplies the seconds beyond `fixed`."""
        return PiecewiseLinear(self.sizes, tuple(fixed + (value - fixed) * factor for value in self.seconds))


class BilinearGrid(NamedTuple):
    """Seconds against two sizes: each value of the first size has a row of points against the second size, the column.

    Rows may differ in their columns. Below the first row or column the first value holds. Beyond a row's last column the row's
    mean slope continues. Beyond the last row the value grows in proportion to the size.
    """

    sizes: tuple[float, ...]
    columns: tuple[tuple[float, ...], ...]
    seconds: tuple[tuple[float, ...], ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float, float]]) -> Self:
        """Returns a grid through (size, column, seconds) points in any order; repeated pairs get the mean."""
        groups = groupby(sorted(points), key=lambda point: point[0])
        rows = {size: _mean_by_size((column, seconds) for _, column, seconds in group) for size, group in groups}
        return cls(tuple(rows), tuple(map(tuple, rows.values())), tuple(tuple(row.values()) for row in rows.values()))

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
        """Returns whether the sizes lie within the measured range: up to the last row, and the last column of the row below."""
        return column <= self.reach(size)

    def reach(self, size: float) -> float:
        """Returns the largest measured column at this size; minus infinity beyond the last row."""
        sizes = self.sizes
        return self.columns[max(bisect_right(sizes, size) - 1, 0)][-1] if size <= sizes[-1] else -inf

    def rectangle(self) -> tuple[float, float]:
        """Returns size and column of the largest rectangle from the origin within the measured range."""
        reach = accumulate((columns[-1] for columns in self.columns), min)
        return max(zip(self.sizes, reach, strict=True), key=lambda corner: corner[0] * corner[1])

    def scaled(self, factor: float) -> Self:
        return self._replace(seconds=tuple(tuple(value * factor for value in row) for row in self.seconds))

    def at_least(self, slope: float) -> Self:
        """Raises each value to `slope` times its column."""
        rows = (zip(*row, strict=True) for row in zip(self.columns, self.seconds, strict=True))
        return self._replace(seconds=tuple(tuple(max(slope * column, value) for column, value in row) for row in rows))

    def breakpoints(self, most: float, farthest: float) -> Iterator[tuple[float, float]]:
        """Yields the (size, column) pairs up to `most` and `farthest` between which the interpolation has no corner."""
        for size, columns in [*zip(self.sizes, self.columns, strict=True), (most, self.columns[-1])]:
            for column in (*columns, farthest):
                yield size, column

    def _along(self, row: int, column: float) -> float:
        columns, seconds = self.columns[row], self.seconds[row]
        right = bisect_right(columns, column)
        if 0 < right < len(columns):
            least, low = columns[right - 1], seconds[right - 1]
            return low + (column - least) / (columns[right] - least) * (seconds[right] - low)
        if right:
            slope = (seconds[-1] - seconds[0]) / (columns[-1] - columns[0]) if len(columns) > 1 else 0.0
            return seconds[-1] + (column - columns[-1]) * max(slope, 0.0)
        return seconds[0]


class ChunkGrid(BilinearGrid):
    """Seconds of a chunk's attention, against (tokens, preceding context).

    Scores are the products of queries and keys. Between rows the seconds are linear in the scores at this context, since attention
    is quadratic in the tokens of long chunks. Beyond the last row each further score takes as long as a score of context in that row.
    """

    __slots__ = ()

    def at(self, size: float, column: float) -> float:
        sizes = self.sizes
        right = bisect_right(sizes, size)
        if right == 0:
            return self._along(0, column)
        left = right - 1
        low, least = self._along(left, column), sizes[left]
        if size == least:
            return low
        double = 2 * column + 1  # twice the scores of t tokens: t * (2 * column + 1 + t)
        below = least * (double + least)
        more = size * (double + size) - below
        if right == len(sizes):
            return low + more / 2 * self._seconds_per_score(left)
        most = sizes[right]
        return low + (self._along(right, column) - low) * more / (most * (double + most) - below)

    def _seconds_per_score(self, row: int) -> float:
        """Returns a row's slope over context; for a row with one column, its mean over the chunk's scores."""
        (first, *_, last), (least, *_, most) = ((*part, part[-1]) for part in (self.columns[row], self.seconds[row]))
        if last > first:
            return max(most - least, 0.0) / (last - first) / self.sizes[row]
        return most / scores(self.sizes[row], last)


def _mean_by_size(points: Iterable[tuple[float, float]]) -> Mapping[float, float]:
    groups = groupby(sorted(points), key=lambda point: point[0])
    values = {size: [seconds for _, seconds in group] for size, group in groups}
    return {size: sum(seconds) / len(seconds) for size, seconds in values.items()}
