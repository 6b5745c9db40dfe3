"""Which blocks of a request have been sent to its decoder so far."""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cbatch.cluster.transfers import Copy
from cbatch.kv import BlockPool
from cbatch.moves import Loading


@dataclass(eq=False)
class SentBlocks:
    """The part of a request's blocks that is sent before the last copy.

    decoder, blocks: where they go. places: int32 [blocks, block size], of each token in `Step.sent`. there: bool, whether it is there, or on
    its way. num_begun: copies. latest: of these. copies: blocks, bytes, start and end of those that have ended, seconds.
    """

    decoder: int
    blocks: NDArray[np.int32]
    places: NDArray[np.int32]
    there: NDArray[np.bool_]
    num_begun: int = 0
    latest: Copy | None = None
    copies: list[tuple[int, int, float, float]] = field(default_factory=list)

    @classmethod
    def to(cls, decoder: int, pool: BlockPool, loading: Loading, first_place: int = 0) -> Self:
        """Counts what the decoder has found in its cache as sent. first_place: of the decoder's cache in `Step.sent`."""
        blocks = pool.tables[loading.row, : pool.held_by(loading.row)].copy()
        offsets = np.arange(pool.block_size, dtype=np.int32)
        places = blocks[:, None] * np.int32(pool.block_size) + offsets + np.int32(first_place)
        places[: loading.num_found] = 0
        there = np.zeros(places.shape, np.bool_)
        there[: loading.num_found] = True
        return cls(decoder, blocks, places, there)

    @property
    def is_copying(self) -> bool:
        return self.num_begun > len(self.copies)

    def missing(self, number: int) -> NDArray[np.int64]:
        """Returns which of the first blocks have to be copied."""
        return np.flatnonzero(~self.there[:number].all(1))
