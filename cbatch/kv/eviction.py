"""Which cached block goes when a plan takes more blocks than are blank: a plug-in, asked when a block must go."""

from collections.abc import Hashable, Sequence
from itertools import chain
from operator import ne
from typing import Any, NamedTuple

from cbatch import calls
from cbatch.errors import PolicyError
from cbatch.request import Request

Name = Hashable
"""Stands for the content of a full block and of all blocks before it."""


class CachedBlock(NamedTuple):
    """A block that no request holds, as an eviction sees it.

    name: see `Name`. start, end: its tokens are those from `start` to before `end` of its prefix.
    is_spare: an older copy of the name is held, which is the one that lookups find.
    num_uses: 1, and 1 for each admission that found the block.
    created, released: order in which blocks got their names and were given up by their last holder.
    released_at: seconds of the latter. holder_tokens: prompt and output of that holder.
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

    The pool asks for keys only when a block must go, and only of leaves: blocks without a cached successor. The smallest key goes;
    among equal keys, the block released longest ago. A key of a block may depend on what `CachedBlock` says alone, and is asked
    for once per release. While `dynamic` is true, keys depend on anything else, and are asked for before each single eviction.
    """

    dynamic = False

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[Any]:
        """Returns a key per block; all keys of an eviction can be compared. now: seconds of the current iteration."""
        return [0] * len(blocks)

    def on_submit(self, request: Request, names: Sequence[Name]) -> None:
        """A request will arrive. names: of the blocks that it can find in the cache."""

    def on_admit(self, request: Request, names: Sequence[Name], now: float) -> None:
        """A request is admitted, perhaps not for the first time. names: of the blocks that it found."""

    def on_release(self, request: Request, names: Sequence[Name], now: float) -> None:
        """A request has ended or was preempted. names: of the full blocks that it held."""

    def on_finish(self, request: Request) -> None:
        """A request has ended."""


def call(eviction: Eviction, method: str, *arguments: Any) -> Any:
    """Calls a method of an eviction. Raises PolicyError, which names both, where the method fails."""
    return calls.call(f"eviction {type(eviction).__name__}", getattr(eviction, method), *arguments)


def keys_of(eviction: Eviction, blocks: Sequence[CachedBlock], now: float) -> Sequence[Any]:
    """Returns a key for each block. Raises PolicyError where `keys` fails, or returns another number of keys."""
    keys: Sequence[Any] = call(eviction, "keys", blocks, now)
    returned = f"{len(keys)} keys" if hasattr(keys, "__len__") else f"a {type(keys).__name__}"
    if returned != f"{len(blocks)} keys":
        raise key_error(eviction, returned, f"a list of {len(blocks)} keys, one per block")
    return keys


def check_numbers(keys: Sequence[Any]) -> None:
    """Raises ValueError if a key, or a part of a tuple, is NaN, which has no order."""
    parts = [*chain.from_iterable(keys)] if len(keys) and isinstance(keys[0], tuple) else keys
    if any(map(ne, parts, parts)):
        raise ValueError("NaN")


def key_error(eviction: Eviction, returned: str, wanted: str) -> PolicyError:
    return PolicyError(f"eviction {type(eviction).__name__}: keys() returned {returned}; return {wanted}")
