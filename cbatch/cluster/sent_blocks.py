"""Which blocks of a request have been sent to its decoder so far."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cbatch.cluster.transfers import Copy
from cbatch.kv import BlockPool
from cbatch.moves import Loading


@dataclass(eq=False)
class SentBlocks:
    """The part of a request's blocks that is sent before the last copy.

    pair: prefiller and decoder. blocks: the decoder's. block_size: tokens. num_found: leading blocks that the decoder had cached. first_place: index in
    `Step.sent` at which the decoder's cache begins. is_over: the prefiller sends no more. num_begun: copies begun. latest: the latest of them.
    copies: number of blocks, bytes, start and end in seconds of each copy that has ended.
    """

    pair: tuple[int, int]
    blocks: NDArray[np.int32]
    block_size: int
    num_found: int
    first_place: int = 0
    is_over: bool = False
    num_begun: int = 0
    latest: Copy | None = None
    copies: list[tuple[int, int, float, float]] = field(default_factory=list)

    @classmethod
    def to(cls, pair: tuple[int, int], pool: BlockPool, loading: Loading, first_place: int = 0) -> Self:
        blocks = pool.tables[loading.row, : pool.held_by(loading.row)].copy()
        return cls(pair, blocks, pool.block_size, loading.num_found, first_place)

    @cached_property
    def places(self) -> NDArray[np.int32]:
        """The cache index of each token as in `Step.sent`, int32 [blocks, block size]."""
        offsets = np.arange(self.block_size, dtype=np.int32)
        places = self.blocks[:, None] * np.int32(self.block_size) + offsets + np.int32(self.first_place)
        places[: self.num_found] = 0
        return places

    @cached_property
    def there(self) -> NDArray[np.bool_]:
        """Whether each token has arrived or is being copied, bool [blocks, block size]."""
        there = np.zeros((len(self.blocks), self.block_size), np.bool_)
        there[: self.num_found] = True
        return there

    @property
    def is_copying(self) -> bool:
        return self.num_begun > len(self.copies)

    def missing(self, number: int) -> NDArray[np.int64]:
        """Returns which of the first `number` blocks have to be copied."""
        return np.flatnonzero(~self.there[:number].all(1))
