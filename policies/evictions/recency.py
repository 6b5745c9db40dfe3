"""Evictions by recency and frequency of use: the orders of SGLang's `evict_policy.py`, for blocks instead of tree nodes.

Blocks with equal keys are evicted in the order of release.
"""

from collections.abc import Sequence

from cbatch import CachedBlock, Eviction


class LRU(Eviction):
    """Evicts the block released longest ago, as in vLLM; a lookup does not count as a use."""


class FIFO(Eviction):
    """Evicts the block with the oldest content."""

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[int]:
        return [block.created for block in blocks]


class LFU(Eviction):
    """Evicts the block that was found least often."""

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[int]:
        return [block.num_uses for block in blocks]


class SLRU(Eviction):
    """Evicts blocks that were never found after their first use before other blocks (segmented LRU)."""

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[bool]:
        return [block.num_uses >= 2 for block in blocks]
