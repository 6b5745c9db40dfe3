"""A policy's view of the KV cache."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cbatch.kv.eviction import BlockHash
from cbatch.kv.pool import blocks_for, blocks_lacking
from cbatch.request import Request


class Freed(NamedTuple):
    """KV blocks that preempting a request frees: now, for the current plan, or later, when an iteration in flight ends."""

    now: int
    later: int


class KVView(ABC):
    """A policy's view of the KV cache.

    block_size: tokens per block. num_blocks: blocks of the whole cache. num_free: blocks that a plan can take.
    num_retiring: taken blocks that become free when the iterations in flight have ended.
    num_cached: free blocks whose content waiting requests may find; 0 without a prefix cache.
    num_ahead: tokens for which a request holds blocks beyond those that it has computed: vLLM's drafters write there.
    """

    block_size: int
    num_blocks: int
    num_free: int
    num_retiring: int
    num_cached: int = 0
    num_ahead: int = 0

    @property
    def num_tokens(self) -> int:
        """Returns the capacity of the whole cache in tokens."""
        return self.num_blocks * self.block_size

    @abstractmethod
    def num_held(self, request: Request) -> int:
        """Returns the blocks that a running request holds; 0 of a waiting one, for which see `num_shared`."""

    @abstractmethod
    def freed_by_preempting(self, request: Request) -> Freed: ...

    def num_shared(self, request: Request) -> int:
        """Returns the cached blocks of a waiting request that are not free: others hold them, or it has moved here with them. They cost nothing."""
        return 0

    def block_hashes(self, request: Request, at_most: int | None = None) -> Sequence[BlockHash]:
        """Returns hashes of a waiting request's full blocks. Equal prefixes have equal hashes. Empty if unknown.

        The first `request.num_computed / block_size` hashes are in the prefix cache. at_most: hashes to return; default all.
        """
        return ()

    def changed_hashes(self) -> Sequence[BlockHash] | None:
        """Returns hashes that have entered or left the prefix cache since the policy's last call; None: unknown."""
        return None

    def num_gained(self, preempted: Iterable[Request], newcomers: Iterable[Request]) -> int:
        """Returns the free blocks that preempting gains at once, beyond the blocks that `num_lacking` counts for these newcomers."""
        return sum(self.freed_by_preempting(request).now for request in preempted)

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def num_lacking(self, request: Request, num_tokens: int) -> int:
        """Returns the free blocks that a request needs for `num_tokens`, beyond its held and shared blocks."""
        held = self.num_held(request) + self.num_shared(request)
        return blocks_lacking(num_tokens + self.num_ahead, held, self.block_size)
