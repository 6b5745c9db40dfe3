"""The plug-in that chooses the cached block to evict when a plan takes more blocks than are blank."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from cbatch import errors
from cbatch.request import Request

BlockHash = Hashable  # a block's hash: identifies the content of a full block and of all preceding blocks


class CachedBlock(NamedTuple):
    """A block that no request holds, for evictions.

    start, end: the block holds the tokens from `start` to before `end` of its prefix.
    is_spare: whether lookups find the same content without the block, because another copy is older or in use.
    num_uses: 1, plus 1 for each admission that found the block.
    created, released: numbers that ascend in the order in which blocks got their hashes, and were released by their last holder.
    released_at: seconds when the last holder released the block. holder_tokens: tokens of prompt and output of that holder.
    """

    hash: BlockHash
    start: int
    end: int
    is_spare: bool
    num_uses: int
    created: int
    released: int
    released_at: float
    holder_tokens: int


class Eviction:
    """Orders the cached blocks that no request holds. This base class evicts the block released longest ago.

    The pool requests keys only when it must evict a block, and only for leaves: blocks without a cached successor. It evicts the
    block with the smallest key; among equal keys, the block released longest ago. A key may depend only on its `CachedBlock`, and is
    requested once per release. While `dynamic` is true, keys may depend on anything, and are requested before each eviction.

    With host memory for the cache, an evicted block goes there if `keeps` returns true; otherwise its content is lost.
    """

    dynamic = False

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[Any]:
        """Returns a number, or a tuple of numbers, for each block. now: seconds of the current iteration."""
        return [0] * len(blocks)

    def keeps(self, block: CachedBlock, now: float) -> bool:
        """Returns whether an evicted block is copied to host memory, unless it is there. If not, blocks that follow it there are lost."""
        return True

    def on_submit(self, request: Request, hashes: Sequence[BlockHash]) -> None:
        """Called when a request will arrive, perhaps from another replica. hashes: of its prompt's full blocks; it finds at most blocks before its last token."""

    def on_admit(self, request: Request, hashes: Sequence[BlockHash], now: float) -> None:
        """Called when a request is admitted, perhaps again. hashes: the hashes of the blocks that it found."""

    def on_give_up(self, session: str, to_host: bool) -> None:
        """Called when the policy gives up a session's blocks. to_host: they are worth a place in host memory: `Plan.give_up`."""

    def on_release(self, request: Request, hashes: Sequence[BlockHash], now: float) -> None:
        """Called when a request has ended or was preempted. hashes: the hashes of the full blocks that it held."""

    def on_finish(self, request: Request) -> None:
        """Called when a request has ended."""


def call(eviction: Eviction, method: str, *arguments: Any) -> Any:
    """Calls a method of an eviction. Raises PolicyError, which states eviction and method, if the method fails."""
    return errors.call(f"eviction {type(eviction).__name__}", getattr(eviction, method), *arguments)
