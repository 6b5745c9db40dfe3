"""The order in which an eviction's keys take cached leaves: blocks that can be evicted without breaking the chain of hashes."""

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from operator import ne
from typing import Any

import numpy as np

from cbatch.errors import PolicyError
from cbatch.kv.eviction import CachedBlock, Eviction, call


class Leaves:
    """A heap of leaves by their keys. Owner: `PrefixPool`, which says what is a leaf. Keys are requested when a block is popped."""

    def __init__(self, num_blocks: int) -> None:
        self._heap: list[tuple[Any, int, int, int]] = []  # (key, released, block, ranking)
        self._ranking = np.zeros(num_blocks, np.int64)  # of each block's latest entry; earlier entries are out of date
        self._unranked: dict[int, None] = {}  # blocks that may have become leaves since the last pop

    def mark(self, blocks: Iterable[int]) -> None:
        """Notes that blocks may have become leaves, or that their keys may have changed."""
        self._unranked |= dict.fromkeys(blocks)

    def pop(
        self, eviction: Eviction, is_leaf: Callable[[int], bool], describe: Callable[[int], CachedBlock], now: float
    ) -> int:
        """Returns the leaf with the smallest key."""
        heap = self._heap
        if eviction.dynamic or len(heap) > 4 * len(self._ranking):
            self.mark(entry[2] for entry in heap)
            heap.clear()
        self._rank(eviction, list(map(describe, leaves := [*filter(is_leaf, self._unranked)])), leaves, now)
        self._unranked.clear()
        while True:
            _, _, block, ranking = heappop(heap)
            if ranking == self._ranking[block] and is_leaf(block):
                return block

    def _rank(self, eviction: Eviction, described: Sequence[CachedBlock], leaves: Sequence[int], now: float) -> None:
        """Pushes leaves to the heap with the eviction's keys. Raises PolicyError if keys are too few or cannot be compared."""
        keys = call(eviction, "keys", described, now)
        try:
            if len(keys := list(keys)) != len(leaves):
                raise ValueError(f"returned {len(keys)} keys")
            for key, block, about in zip(keys, leaves, described, strict=True):
                if key != key or (isinstance(key, tuple) and any(map(ne, key, key))):
                    raise ValueError("NaN has no order")
                self._ranking[block] += 1
                heappush(self._heap, (key, about.released, block, self._ranking.item(block)))
        except Exception as error:
            wanted = f"return a number, or a tuple of numbers, for each of {len(leaves)} blocks"
            raise PolicyError(f"eviction {type(eviction).__name__}: keys() ({error}); {wanted}") from error
