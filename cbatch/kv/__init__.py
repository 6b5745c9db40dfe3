"""The KV cache: its blocks, the requests that hold them, and the blocks that outlive their requests."""

from cbatch.kv.cache import PrefixCache
from cbatch.kv.eviction import BlockHash, CachedBlock, Eviction
from cbatch.kv.host import Copies
from cbatch.kv.pool import BlockPool, CountingPool, KVSize, blocks_for, blocks_lacking
from cbatch.kv.prefix import PrefixPool
from cbatch.kv.view import Freed, KVView

__all__ = ["BlockHash", "BlockPool", "CachedBlock", "Copies", "CountingPool", "Eviction", "Freed", "KVSize", "KVView"]
__all__ += ["PrefixCache", "PrefixPool", "blocks_for", "blocks_lacking"]
