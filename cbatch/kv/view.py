"""The KV cache as a policy sees it."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from cbatch.kv.pool import blocks_for, blocks_lacking
from cbatch.request import Request


class Freed(NamedTuple):
    """KV blocks that preempting a request frees: now, for the plan being made, and later, after an iteration."""

    now: int
    later: int


class KVView(ABC):
    """The KV cache as a policy sees it. Blocks that come free only when an iteration in flight ends count as taken.

    block_size: tokens per block. num_blocks: of the whole cache. num_free: blocks that a plan can take.
    num_retiring: blocks that come free when the iterations in flight have ended.
    """

    block_size: int
    num_blocks: int
    num_free: int
    num_retiring: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole cache holds."""
        return self.num_blocks * self.block_size

    @abstractmethod
    def num_held(self, request: Request) -> int:
        """Blocks that a request holds."""

    @abstractmethod
    def freed_by_preempting(self, request: Request) -> Freed: ...

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def num_lacking(self, request: Request, num_tokens: int) -> int:
        """Blocks that a request needs beyond its own to hold `num_tokens`."""
        return blocks_lacking(num_tokens, self.num_held(request), self.block_size)
