"""The KV cache: its blocks, and which request holds which of them."""

from cbatch.kv.pool import BlockPool, CountingPool, KVSize, blocks_for, blocks_lacking

__all__ = ["BlockPool", "CountingPool", "KVSize", "blocks_for", "blocks_lacking"]
