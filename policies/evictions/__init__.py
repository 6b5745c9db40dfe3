"""Evictions: which cached block is evicted first when KV blocks run short."""

from policies.evictions.belady import Belady
from policies.evictions.given_up import GivenUp
from policies.evictions.marconi import Marconi
from policies.evictions.recency import FIFO, LFU, LRU, SLRU
from policies.evictions.soft_ttl import SoftTTL
from policies.evictions.tlru import TLRU

__all__ = ["FIFO", "LFU", "LRU", "SLRU", "TLRU", "Belady", "GivenUp", "Marconi", "SoftTTL"]
