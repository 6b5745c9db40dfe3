"""Consistent hashing: keys and replicas on a circle, so that few keys move when the number of replicas changes."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import lru_cache
from hashlib import blake2b
from itertools import chain

NUM_POINTS = 100
"""Points of each replica on the circle."""


class HashRing:
    """Replicas at points of a circle. A key belongs to the first point at its own position or after it."""

    def __init__(self, points: Iterable[tuple[int, int]]) -> None:
        """points: positions, each with the index of its replica."""
        ordered = sorted(points)
        self._positions = [position for position, _ in ordered]
        self._replicas = [replica for _, replica in ordered]

    def clockwise(self, position: int) -> Iterator[int]:
        """Yields the replicas in the order of the circle from a position on, a replica once for each of its points."""
        first = bisect_left(self._positions, position)
        return chain(self._replicas[first:], self._replicas[:first])


@lru_cache(maxsize=8)
def ring_of(num_replicas: int) -> HashRing:
    """Returns the circle of replicas 0, 1, ..."""
    pairs = ((replica, point) for replica in range(num_replicas) for point in range(NUM_POINTS))
    return HashRing((position_of(f"{replica}-{point}"), replica) for replica, point in pairs)


def position_of(key: str) -> int:
    """Returns the position of a key, the same in every process."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest())
