"""What a router remembers of the prompts that it has sent to one replica in its present life; it is never told of evictions.

SGLang's router drops a worker's part of its tree, and llm-d's indexer a pod's blocks, when the worker or pod is removed. Here at the next start.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Self

from cbatch import BlockHash
from cbatch.cluster import ClusterView


class SentPrefixes:
    """A prefix tree as a set of block hashes; a hash identifies all blocks before it. A node ends where prompts part or end."""

    def __init__(self, life: int = 0) -> None:
        """life: of the replica."""
        self.life = life
        self._parents: OrderedDict[BlockHash, BlockHash | None] = (
            OrderedDict()
        )  # least recently used first, leaves before their parents
        self._num_children: Counter[BlockHash | None] = Counter()
        self._ends = set[BlockHash]()  # last blocks of prompts

    @classmethod
    def renew(cls, sent: list[Self], view: ClusterView) -> None:
        """Makes `sent` what each replica was sent in its present life. Call before each choice."""
        lives = (replica.life for replica in view)
        sent[:] = [old if old is not None and old.life == life else cls(life) for old, life in zip_longest(sent, lives)]

    def __len__(self) -> int:
        return len(self._parents)

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Returns how many leading blocks were sent."""
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in self._parents)

    def add(self, hashes: Sequence[BlockHash]) -> None:
        """Adds a prompt's blocks, the most recently used ones."""
        before: BlockHash | None = None
        for block_hash in hashes:
            if block_hash not in self._parents:
                self._parents[block_hash] = before
                self._num_children[before] += 1
            before = block_hash
        self._ends.update(hashes[-1:])
        self.touch(hashes)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Makes blocks the most recently used ones."""
        for block_hash in reversed(hashes):
            self._parents.move_to_end(block_hash)

    def trim(self, most: int) -> None:
        """Removes whole leaves, least recently used first, until at most this many blocks are left."""
        while len(self._parents) > most:
            block: BlockHash | None = next(iter(self._parents))
            while block is not None:
                parent = self._parents.pop(block)
                self._ends.discard(block)
                self._num_children[parent] -= 1
                block = None if parent in self._ends or self._num_children[parent] else parent
