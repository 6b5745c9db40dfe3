"""The block arithmetic of the paged KV cache, and the pool that records the blocks of each request.

A block holds keys and values of `block_size` tokens in every layer (PagedAttention, Kwon et al., SOSP 2023). The pool
knows only block numbers, not their memory.
"""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cbatch.request import Ints
from cbatch.request_table import ZERO

N = TypeVar("N", int, Ints)


def blocks_for(num_tokens: N, block_size: int) -> N:
    """Returns the number of blocks that hold `num_tokens`, a number or an array."""
    return -(-num_tokens // block_size)


def blocks_lacking(num_tokens: int, num_held: int, block_size: int) -> int:
    """Returns the further blocks that a request with `num_held` blocks needs for `num_tokens`."""
    return max(-(-num_tokens // block_size) - num_held, 0)


class KVSize(NamedTuple):
    """Size of a KV cache: blocks, tokens per block, and blocks in host memory, for what a prefix cache evicts."""

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


class BlockPool:
    """The blocks of the KV cache and the block tables of the requests that hold them.

    Owner and only writer: `State`. Blocks that are released while an iteration in flight may still read or write them are
    *retiring*: they count as taken until that iteration has ended.

    tables: int32 [rows, blocks per request]; the blocks of each row of the `RequestTable`, in token order, stale beyond `held`.
    room: int64 [rows]; tokens that the blocks of each row can hold. shares: whether rows may share blocks.
    """

    shares = False

    def __init__(self, num_blocks: int, block_size: int, num_rows: int, max_tokens_per_request: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"KV cache needs at least 1 block of 1 token, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        width = min(self.blocks_for(max_tokens_per_request), num_blocks)
        self.tables = np.zeros((num_rows, width), np.int32)
        self.room = np.zeros(num_rows, np.int64)
        self.num_free = num_blocks
        self.num_retiring = 0
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack; the top is at num_free
        self._retiring: dict[int, list[NDArray[np.int32]]] = {}  # by the iteration that still uses them

    @property
    def num_used(self) -> int:
        """Returns the number of blocks that are not free, including retiring blocks."""
        return self.num_blocks - self.num_free

    def num_shared_tokens(self, rows: Ints) -> int:
        """Returns the tokens saved by sharing among these rows: (holders - 1) x block size, over all blocks. Each row holds blocks."""
        return 0

    @property
    def held(self) -> Ints:
        """Returns the number of blocks of each row, [rows]."""
        return self.room // self.block_size

    @property
    def num_tokens(self) -> int:
        """Returns the capacity of the whole cache in tokens."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def held_by(self, row: int) -> int:
        """Returns the number of blocks of one row."""
        return self.room.item(row) // self.block_size

    def num_alone(self, row: int) -> int:
        """Returns the number of blocks of one row that no other row holds."""
        return self.held_by(row)

    def num_gained(self, rows: Iterable[int]) -> int:
        """Returns the free blocks gained if these rows are released at once."""
        return sum(map(self.held_by, rows))

    def lacking(self, room: Ints, num_tokens: Ints) -> tuple[Ints, list[int]]:
        """Returns the places of requests whose `room` is below `num_tokens`, and the number of blocks that each lacks."""
        more = num_tokens - room
        places = (more > ZERO).nonzero()[0]
        return places, [-(-tokens // self.block_size) for tokens in more[places].tolist()]

    def extend(self, row: int, num_blocks: int) -> None:
        """Appends free blocks to one row's table."""
        held = self.held_by(row)
        self.tables[row, held : held + num_blocks] = self._take(num_blocks)
        self.room[row] += num_blocks * self.block_size

    def extend_each(self, rows: Ints, num_blocks: list[int]) -> None:
        """Appends free blocks to the tables of several rows."""
        if len(num_blocks) == 1:
            self.extend(rows.item(), num_blocks[0])
            return
        blocks, held, first = self._take(sum(num_blocks)), self.room[rows] // self.block_size, len(rows)
        self.tables[rows, held] = blocks[:first]
        for row, begin, number in zip(rows.tolist(), (held + 1).tolist(), num_blocks, strict=True):
            if number > 1:
                self.tables[row, begin : begin + number - 1] = blocks[first : (first := first + number - 1)]
        self.room[rows] += np.array(num_blocks) * self.block_size

    def release(self, row: int, after: int | None, keep: int = 0) -> None:
        """Releases a row's blocks: at once, or after the end of an iteration in flight that still uses them. keep: leading blocks that stay."""
        blocks = self.tables[row, keep : self.held_by(row)].copy()
        self.room[row] = keep * self.block_size
        if after is None:
            self._give(blocks)
        else:
            self._retiring.setdefault(after, []).append(blocks)
            self.num_retiring += len(blocks)

    def retire(self, iteration: int) -> None:
        """Frees the blocks that only this ended iteration still used."""
        for blocks in self._retiring.pop(iteration, ()):
            self.num_retiring -= len(blocks)
            self._give(blocks)

    def grow(self, num_rows: int) -> None:
        """Extends the pool to the rows of a `RequestTable` that has grown."""
        extra = num_rows - len(self.room)
        self.room = np.concatenate([self.room, np.zeros(extra, np.int64)])
        self.tables = np.concatenate([self.tables, np.zeros((extra, self.tables.shape[1]), np.int32)])

    def _take(self, num_blocks: int) -> NDArray[np.int32]:
        assert num_blocks <= self.num_free, "a validated plan takes no more blocks than are free"
        self.num_free -= num_blocks
        return self._free[self.num_free : self.num_free + num_blocks][::-1]

    def _give(self, blocks: NDArray[np.int32]) -> None:
        self._free[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)


class CountingPool(BlockPool):
    """Counts blocks without numbering them, for executors that store no KV cache. `tables` is not kept."""

    def __init__(self, num_blocks: int, block_size: int, num_rows: int, max_tokens_per_request: int) -> None:
        super().__init__(num_blocks, block_size, num_rows, max_tokens_per_request)
        self._num_retiring_after: dict[int, int] = {}

    def extend(self, row: int, num_blocks: int) -> None:
        self.num_free -= num_blocks
        self.room[row] += num_blocks * self.block_size

    def extend_each(self, rows: Ints, num_blocks: list[int]) -> None:
        for row, number in zip(rows.tolist(), num_blocks, strict=True):
            self.extend(row, number)

    def release(self, row: int, after: int | None, keep: int = 0) -> None:
        held = self.held_by(row) - keep
        self.room[row] = keep * self.block_size
        if after is None:
            self.num_free += held
        else:
            self._num_retiring_after[after] = self._num_retiring_after.get(after, 0) + held
            self.num_retiring += held

    def retire(self, iteration: int) -> None:
        number = self._num_retiring_after.pop(iteration, 0)
        self.num_retiring -= number
        self.num_free += number


class SharingPool(BlockPool):
    """Blocks with reference counts, which a subclass maintains.

    live, leaving: int32 [blocks]; tables that contain each block, and releases of it that iterations in flight delay.
    """

    shares = True

    def __init__(self, num_blocks: int, block_size: int, num_rows: int, max_tokens_per_request: int) -> None:
        super().__init__(num_blocks, block_size, num_rows, max_tokens_per_request)
        self.live, self.leaving = np.zeros((2, num_blocks), np.int32)
        self._num_repeated = 0  # table entries, excluding the first entry of each block

    def num_shared_tokens(self, rows: Ints) -> int:
        if not self._num_repeated:
            return 0
        holds = self.room > 0
        holds[rows] = False
        others = holds.nonzero()[0]
        few = rows if len(rows) < len(others) else others
        if len(few) < 2:  # a row's blocks are distinct
            blocks = self.tables[few, : int(self.room[few].sum()) // self.block_size]
            num_lost = int(np.count_nonzero(self.live[blocks] == 1))
            return 0 if few is rows else (self._num_repeated - (blocks.size - num_lost)) * self.block_size
        held = self.room[few] // self.block_size
        places = np.arange(held.max(initial=0))
        blocks = self.tables[few, : len(places)][places < held[:, None]]
        distinct, num_holders = np.unique(blocks, return_counts=True)
        if few is rows:
            return (len(blocks) - len(distinct)) * self.block_size
        num_lost = int(np.count_nonzero(num_holders == self.live[distinct]))  # blocks that only other rows hold
        return (self._num_repeated - (len(blocks) - num_lost)) * self.block_size

    def num_alone(self, row: int) -> int:
        """Returns the number of a row's blocks that no other table contains and no other iteration in flight uses."""
        blocks = self.tables[row, : self.held_by(row)]
        return int(np.count_nonzero(self.live[blocks] + self.leaving[blocks] == 1))
