"""The reference counts of KV blocks that several requests share."""

import numpy as np

from cbatch.kv.pool import BlockPool
from cbatch.request import Ints


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
