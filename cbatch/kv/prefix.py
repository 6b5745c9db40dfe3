"""A pool whose blocks requests can share, and which keeps the content of blocks that no request holds.

             extend              register                release              extend
    blank -----------> live ----------------> live, hashed ----------> cached ----------> live (its hash is forgotten)
      ^                  |                         ^                      |
      |     release      |                         |        share         |
      +------------------+                         +----------------------+

A full block gets a *hash* of its content and of all preceding blocks, so that a lookup needs no tree (vLLM V1).
Blocks of equal content that are computed at the same time are all kept. The pool knows no tokens: `hashes` makes the hashes.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence, Set
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from cbatch.kv.changes import Changes
from cbatch.kv.eviction import BlockHash, CachedBlock, Eviction, call
from cbatch.kv.host import HostTier
from cbatch.kv.leaves import Leaves
from cbatch.kv.pool import SharingPool


class PrefixPool(SharingPool):
    """Blocks with hashes and reference counts.

    Each block is in one of four states: blank; *cached*: hashed, and in no block table; *live*: in `live` tables; *retiring*: in no
    table, but `leaving` iterations in flight may still use it. Blank and cached blocks are free. The set of hashes is closed: if it
    contains a hash, it contains the hashes of all preceding blocks, because only *leaves* are evicted: blocks without a hashed
    successor, or with another copy of their hash. Cached blocks imply a cached leaf: a table with a successor also has a copy.

    num_hashed: int64 [rows], leading blocks of each row with hashes. version: changes with the set of hashes. num_cleared: calls of `clear`.
    now: seconds, set by the owner. hashes: of the device's blocks. changes: a log of hashes added or removed. host: takes what is evicted.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_rows: int, longest: int, eviction: Eviction, on_host: int = 0
    ) -> None:
        """longest: tokens of a request. on_host: blocks that fit into host memory."""
        super().__init__(num_blocks, block_size, num_rows, longest)
        self.eviction, self.host = eviction, HostTier(on_host)
        self.num_hashed = np.zeros(num_rows, np.int64)
        self.version = self.num_evicted = self.num_cleared = 0
        self.changes = Changes(4 * (num_blocks + on_host))
        self.now = 0.0
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # in the order of release
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._before: list[BlockHash | None] = [None] * num_blocks  # hashes of the preceding blocks
        self._blocks: dict[BlockHash, int] = {}  # the oldest copy
        self._copies: dict[BlockHash, list[int]] = {}  # further copies
        self._num_successors: dict[BlockHash, int] = {}
        self._depth, self._num_uses, self._created, self._released, self._holder_tokens = np.zeros((5, num_blocks), int)
        self._released_at = np.zeros(num_blocks)
        self._clock = 1  # numbers registrations and releases
        self._keeps_all = type(eviction).keeps is Eviction.keeps or not on_host
        self._in_order = type(eviction).keys is Eviction.keys and self._keeps_all  # of release
        self._leaves = Leaves(num_blocks)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._blocks or block_hash in self.host

    @property
    def hashes(self) -> Set[BlockHash]:
        return self._blocks.keys()

    @property
    def num_cached(self) -> int:
        """Returns the number of cached blocks, which keep their content and are in no table."""
        return len(self._cached)

    def num_in_use(self, hashes: Iterable[BlockHash]) -> int:
        """Returns how many blocks with these cached hashes are live or retiring, so that sharing them takes no free block."""
        blocks = self._find(filter(self._blocks.__contains__, hashes) if len(self.host) else hashes)
        return int(np.count_nonzero(self.live[blocks] + self.leaving[blocks]))

    def num_gained(self, rows: Iterable[int], newcomers: Iterable[Iterable[BlockHash]] = ()) -> int:
        """Returns the free blocks gained if these rows are released at once and newcomers then share the blocks with these hashes."""
        held = Counter(chain.from_iterable(self.tables[row, : self.held_by(row)].tolist() for row in rows))
        freed = {block for block, number in held.items() if self.live[block] + self.leaving[block] == number}
        found = {*chain.from_iterable(newcomers)}
        shared = self._find(found & self._blocks.keys() if len(self.host) else found)
        num_free = len(found) - int(np.count_nonzero(self.live[shared] + self.leaving[shared]))
        return len(freed) - num_free - len(freed.intersection(shared.tolist()))

    def num_on_device(self, hashes: Sequence[BlockHash]) -> int:
        """Returns how many of these hashes of successive blocks the device has: the first ones."""
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in self._blocks)

    def load(self, row: int, hashes: Sequence[BlockHash]) -> None:
        """Completes the table of a row with the blocks that have these hashes; those that only the host has are copied back."""
        number = self.num_on_device(hashes)
        self.share(row, hashes[self.held_by(row) : number])
        if number < len(hashes):
            self.extend(row, len(hashes) - number)
            self.host.read(hashes[number:], self.tables[row, number : len(hashes)].tolist())
            self.register(row, hashes, len(hashes))

    def share(self, row: int, hashes: Sequence[BlockHash]) -> None:
        """Appends the blocks that have these hashes to the table of a row, which holds the blocks before them."""
        first, blocks = self.held_by(row), self._find(hashes)
        unused = blocks[self.live[blocks] == 0]
        for block in unused[self.leaving[unused] == 0].tolist():
            del self._cached[block]
            self.num_free -= 1
        self.num_retiring -= int(np.count_nonzero(self.leaving[unused]))
        self.live[blocks] += 1
        self._num_repeated += len(blocks) - len(unused)
        self._num_uses[blocks] += 1
        self.tables[row, first : first + len(blocks)] = blocks
        self.room[row] = (first + len(blocks)) * self.block_size
        self.num_hashed[row] = first + len(blocks)

    def register(self, row: int, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Gives the first blocks of a row, which must be full, their hashes. Hashed blocks keep theirs."""
        first = self.num_hashed.item(row)
        if not (new := hashes[first:num_blocks]):
            return
        blocks = self.tables[row, first:num_blocks]
        taken = blocks.tolist()
        assert self.live[blocks].tolist().count(1) == len(taken), "a block that is written belongs to one request"
        if not self._in_order:
            self._depth[blocks] = np.arange(first, num_blocks)
            self._num_uses[blocks] = 1
            self._created[blocks] = np.arange(self._clock, self._clock + len(taken))
            self._clock += len(taken)
        before = hashes[first - 1] if first else None
        for block, block_hash in zip(taken, new, strict=True):
            self._hashes[block], self._before[block] = block_hash, before
            before = block_hash
        num_held = 0
        while num_held < len(new) and new[num_held] in self._blocks:
            num_held += 1
        for block, block_hash in zip(taken, new[:num_held], strict=False):  # further copies
            self._unrank_copies(block_hash)
            self._copies.setdefault(block_hash, []).append(block)
        if num_held < len(new):  # no other hash is known: hashes are closed
            added = new[num_held:]
            self._blocks.update(zip(added, taken[num_held:], strict=True))
            self._num_successors.update(dict.fromkeys(added[:-1], 1))
            if (before := self._before[taken[num_held]]) is not None:
                self._num_successors[before] = self._num_successors.get(before, 0) + 1
        self.num_hashed[row] = num_blocks
        self.version += 1
        self.changes.add(new)

    def note_holder(self, row: int, num_tokens: int) -> None:
        """Stores the tokens of the request that is about to release a row, for `CachedBlock.holder_tokens`."""
        self._holder_tokens[self.tables[row, : self.held_by(row)]] = num_tokens

    def release(self, row: int, after: int | None, keep: int = 0) -> None:
        blocks = self.tables[row, keep : self.held_by(row)].copy()
        self.room[row], self.num_hashed[row] = keep * self.block_size, min(self.num_hashed[row], keep)
        self.live[blocks] -= 1
        last = int(np.count_nonzero(self.live[blocks] == 0))
        self.num_retiring += last
        self._num_repeated -= len(blocks) - last
        if after is None:
            self._give(blocks)
        else:
            self.leaving[blocks] += 1
            self._retiring.setdefault(after, []).append(blocks)

    def retire(self, iteration: int) -> None:
        for blocks in self._retiring.pop(iteration, ()):
            self.leaving[blocks] -= 1
            self._give(blocks)

    def grow(self, num_rows: int) -> None:
        self.num_hashed = np.concatenate([self.num_hashed, np.zeros(num_rows - len(self.room), np.int64)])
        super().grow(num_rows)

    def clear(self) -> None:
        """Forgets the content of all cached blocks, which are not counted as evicted, and of host memory."""
        num_evicted = self.num_evicted
        while self._cached:
            self._blank.append(self._evict())
        self.num_evicted, self.num_cleared = num_evicted, self.num_cleared + 1
        self.changes.add(self.host.clear())

    def _find(self, hashes: Iterable[BlockHash]) -> NDArray[np.int32]:
        return np.fromiter(map(self._blocks.__getitem__, hashes), np.int32)

    def _take(self, num_blocks: int) -> NDArray[np.int32]:
        assert num_blocks <= self.num_free, "a validated plan takes no more blocks than are free"
        self.num_free -= num_blocks
        first = max(len(self._blank) - num_blocks, 0)
        taken = self._blank[first:][::-1]
        del self._blank[first:]
        while len(taken) < num_blocks:
            oldest = self._evict_oldest(num_blocks - len(taken)) if self._in_order else []
            taken += oldest or [self._evict()]
        blocks = np.array(taken, np.int32)
        self.live[blocks] = 1
        return blocks

    def _give(self, blocks: NDArray[np.int32]) -> None:
        """Frees the blocks that no table and no iteration in flight uses, last block first."""
        free = blocks[self.live[blocks] + self.leaving[blocks] == 0][::-1].tolist()
        self.num_retiring -= len(free)
        self.num_free += len(free)
        hashed = [block for block in free if self._hashes[block] is not None]
        self._blank += free[: len(free) - len(hashed)]  # the last blocks of a table
        self._cached.update(dict.fromkeys(hashed))
        if self._in_order:
            return
        for block in hashed:
            self._unrank_copies(self._hashes[block])
        self._released[hashed] = np.arange(self._clock, self._clock + len(hashed))
        self._released_at[hashed] = self.now
        self._clock += len(hashed)

    def _forget(self, block: int) -> None:
        """Removes a block's hash. After the last copy of a hash, the preceding block may become a leaf."""
        block_hash, before = self._hashes[block], self._before[block]
        kept = self._keeps_all or call(self.eviction, "keeps", self._describe(block), self.now)
        self._hashes[block] = None
        self.num_evicted += 1
        self.version += 1
        if copies := self._copies.get(block_hash):
            if self._blocks[block_hash] == block:
                self._blocks[block_hash] = copies.pop(0)
            else:
                copies.remove(block)
            if not copies:
                del self._copies[block_hash]
            self._unrank_copies(block_hash)
            return
        del self._blocks[block_hash]
        self._leave(block, block_hash, before, kept)
        if before is not None:
            self._num_successors[before] -= 1
            if not self._num_successors[before]:
                del self._num_successors[before]
                self._unrank_copies(before)

    def _leave(self, block: int, block_hash: BlockHash | None, before: BlockHash | None, kept: bool) -> None:
        """Keeps a hash that leaves the device in the host's tier, or drops it there as well."""
        self.changes.add((block_hash,))
        if self.host.num_slots:
            self.changes.add(self.host.keep(block_hash, before, block) if kept else self.host.drop(block_hash))

    def _unrank_copies(self, block_hash: BlockHash) -> None:
        """Notes that blocks of this hash may have become leaves, or spare, or no longer spare."""
        if not self._in_order:
            self._leaves.mark((self._blocks[block_hash], *self._copies.get(block_hash, ())))

    def _is_leaf(self, block: int) -> bool:
        """Returns whether a block is cached and no hashed block follows it, or its hash has another copy."""
        block_hash = self._hashes[block]
        return block in self._cached and (block_hash not in self._num_successors or block_hash in self._copies)

    def _evict_oldest(self, at_most: int) -> list[int]:
        """Removes the hashes of the blocks released longest ago, as long as each is a leaf and the only copy. Returns the blocks."""
        hashes, copies, successors = self._hashes, self._copies, self._num_successors
        evicted = []
        for block in islice(self._cached, at_most):
            if (block_hash := hashes[block]) in successors or block_hash in copies:
                break
            del self._blocks[block_hash]
            evicted.append(block)
            if (before := self._before[block]) is not None and (number := successors.pop(before)) > 1:
                successors[before] = number - 1
        for block in evicted:
            self._leave(block, hashes[block], self._before[block], True)
            del self._cached[block]
            hashes[block] = None
        self.num_evicted += len(evicted)
        self.version += len(evicted)
        return evicted

    def _evict(self) -> int:
        """Removes the hash of the cached leaf with the smallest key. Returns the block."""
        if self._in_order:
            block = next(filter(self._is_leaf, self._cached))  # a leaf exists: see the class
        else:
            block = self._leaves.pop(self.eviction, self._is_leaf, self._describe, self.now)
        del self._cached[block]
        self._forget(block)
        return block

    def _describe(self, block: int) -> CachedBlock:
        block_hash, start = self._hashes[block], self._depth.item(block) * self.block_size
        copies = [self._blocks[block_hash], *self._copies.get(block_hash, ())]
        is_spare = copies[0] != block or bool((self.live[copies] + self.leaving[copies]).any())
        return CachedBlock(
            block_hash,
            start,
            start + self.block_size,
            is_spare,
            self._num_uses.item(block),
            self._created.item(block),
            self._released.item(block),
            self._released_at.item(block),
            self._holder_tokens.item(block),
        )
