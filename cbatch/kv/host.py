"""The tier of a prefix cache in host memory: what is evicted from the device is kept here until it is found again.

    device   cached block --evicted--> taken again            an eviction may also drop a block, with all that follows it
                 | copied out                ^ copied back
    host       slot ----------- found -------+                the slot keeps its copy: the next eviction copies nothing

Hashes are closed over both tiers: if either has a hash, one of them has each preceding hash. Slots are overwritten in the order in which their
hashes last left the device. Blocks leave the device before the blocks that they follow, so the first slot in this order is followed by
none, or the device has its hash.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cbatch.kv.eviction import BlockHash


class Copies(NamedTuple):
    """Copies of KV blocks before an iteration, as pairs of block and slot. out: to the host, copied first. back: to the device."""

    out: Sequence[tuple[int, int]] = ()
    back: Sequence[tuple[int, int]] = ()


class HostTier:
    """The slots of the tier, each of the size of a block. Owner: `PrefixPool`.

    num_out, num_back: blocks copied to the host, and from it.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.num_out, self.num_back = num_slots, 0, 0
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()  # in the order of leaving the device
        self._free = list(range(num_slots - 1, -1, -1))  # a stack
        self._before: dict[BlockHash, BlockHash | None] = {}
        self._following: dict[BlockHash, set[BlockHash]] = {}
        self._reading: set[BlockHash] = set()  # by the next iteration
        self._out, self._back = list[tuple[int, int]](), list[tuple[int, int]]()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def hold(self, hashes: Iterable[BlockHash]) -> None:
        """Protects slots that the next iteration reads."""
        self._reading.update(hashes)

    def read(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> None:
        self._back += zip(blocks, map(self._slots.__getitem__, hashes), strict=True)

    def keep(self, block_hash: BlockHash, before: BlockHash | None, block: int) -> Sequence[BlockHash]:
        """Takes in a hash that leaves the device, from this block. Returns the hashes that leave the host.

        before: the preceding hash.
        """
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return ()
        lost: Sequence[BlockHash] = ()
        if not self._free:
            if (oldest := next((other for other in self._slots if other not in self._reading), None)) is None:
                return ()
            lost = (oldest,)
            self._remove(oldest)
        self._slots[block_hash] = slot = self._free.pop()
        self._before[block_hash] = before
        if before is not None:
            self._following.setdefault(before, set()).add(block_hash)
        self._out.append((block, slot))
        return lost

    def drop(self, block_hash: BlockHash) -> list[BlockHash]:
        """Forgets a hash, if it is here, and all hashes that follow it here. Returns them."""
        dropped, left = list[BlockHash](), [block_hash]
        while left:
            left += self._following.pop(one := left.pop(), ())
            if one in self._slots:
                dropped.append(one)
                self._remove(one)
        return dropped

    def _remove(self, block_hash: BlockHash) -> None:
        """Forgets a hash alone: what follows it here can be found as long as the device has the hash."""
        self._free.append(self._slots.pop(block_hash))
        if (before := self._before.pop(block_hash)) is not None and before in self._following:
            self._following[before].discard(block_hash)
            if not self._following[before]:
                del self._following[before]

    def clear(self) -> Sequence[BlockHash]:
        """Forgets all hashes, and the copies since the last call of `take_copies`. Returns the hashes."""
        lost = [*self._slots]
        for block_hash in lost:
            self._remove(block_hash)
        self._out, self._back = [], []
        return lost

    def take_copies(self) -> Copies | None:
        """Returns the copies since the last call; None if there are none."""
        if not (self._out or self._back):
            return None
        copies, self._out, self._back = Copies(self._out, self._back), [], []
        self.num_out += len(copies.out)
        self.num_back += len(copies.back)
        self._reading.clear()
        return copies
