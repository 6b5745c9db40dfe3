"""Chooses the cached block to evict when a plan takes more blocks than are blank; a plug-in."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from cbatch import calls
from cbatch.request import Request

Name = Hashable
"""Stands for the content of a full block and of all blocks before it."""


class CachedBlock(NamedTuple):
    """A block that no request holds, as an eviction sees it.

    start, end: its tokens are those from `start` to before `end` of its prefix.
    is_spare: lookups find the same content without the block: another copy is older, or in use.
    num_uses: 1, and 1 for each admission that found the block.
    created, released: numbers, ascending in the order in which blocks got their names, and were given up by their last holder.
    released_at: seconds when the last holder gave the block up. holder_tokens: prompt and output of that holder.
    """

    name: Name
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

    The pool asks for keys only when a block must go, and only of leaves: blocks without a cached successor. It evicts the block
    of the smallest key, among equal keys the block released longest ago. A key may depend on its `CachedBlock` alone, and is asked
    for once per release. While `dynamic` is true, keys may depend on anything, and are asked for before each eviction.
    """

    dynamic = False

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[Any]:
        """Returns a number, or a tuple of numbers, for each block. now: seconds of the current iteration."""
        return [0] * len(blocks)

    def on_submit(self, request: Request, names: Sequence[Name]) -> None:
        """A request will arrive. names: the names of its prompt's full blocks; it finds at most those before its last token."""

    def on_admit(self, request: Request, names: Sequence[Name], now: float) -> None:
        """A request is admitted, perhaps not for the first time. names: the names of the blocks that it found."""

    def on_release(self, request: Request, names: Sequence[Name], now: float) -> None:
        """A request has ended or was preempted. names: the names of the full blocks that it held."""

    def on_finish(self, request: Request) -> None:
        """A request has ended."""


def call(eviction: Eviction, method: str, *arguments: Any) -> Any:
    """Calls a method of an eviction. Raises PolicyError, which names both, where the method fails."""
    return calls.call(f"eviction {type(eviction).__name__}", getattr(eviction, method), *arguments)
