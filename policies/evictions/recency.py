"""Evictions by when and how often a block was used: the orders of SGLang's `evict_policy.py`, over blocks instead of tree nodes.

Equal keys go in the order of release.
"""

from collections.abc import Sequence

from cbatch import CachedBlock, Eviction


class LRU(Eviction):
    """Evicts the block released longest ago, as in vLLM; a lookup is no use of a block."""


class FIFO(Eviction):
    """Oldest content first."""

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[int]:
        return [block.created for block in blocks]


class LFU(Eviction):
    """Evicts the block that was found least often."""

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[int]:
        return [block.num_uses for block in blocks]


class SLRU(Eviction):
    """Blocks that were never found after their first use go before the others (segmented LRU)."""

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[bool]:
        return [block.num_uses >= 2 for block in blocks]
