"""The KV cache: its blocks, and which request holds which of them."""

from cbatch.kv.pool import BlockPool, CountingPool, KVSize, blocks_for, blocks_lacking
from cbatch.kv.view import Freed, KVView

__all__ = ["BlockPool", "CountingPool", "Freed", "KVSize", "KVView", "blocks_for", "blocks_lacking"]
