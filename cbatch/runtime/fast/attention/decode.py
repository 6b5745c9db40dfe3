"""Computes decodes with our own kernel, and prompt chunks with a kernel for many queries.

With one query per request, a kernel for many queries leaves the memory idle between its tiles. Unless it splits contexts,
it leaves most of the GPU idle as well.
"""

from typing import Protocol

import torch
from torch import Tensor

from cbatch.runtime.batch import Extents, Fields
from cbatch.runtime.fast.attention.rows import Rows, chunk_rows
from cbatch.runtime.fast.attention.triton_decodes import Decodes


class Chunks(Protocol):
    """Attention over only the chunks of an iteration."""

    name: str

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, bounds: Extents, *, scaling: float
    ) -> Tensor:
        """Computes `Attention` for these rows. Returns [tokens, heads, head dim], undefined at the tokens of other requests."""


class SplitAttention:
    """Combines our kernel for all decodes with another kernel for the chunks of mixed iterations. Implements `Attention`."""

    def __init__(self, chunks: Chunks, decodes: Decodes) -> None:
        self.name = f"{chunks.name}, decodes by our kernel"
        self._chunks = chunks
        self._decodes = decodes
        self._batch: Fields[Tensor] | None = None
        self._rows: Rows | None = None

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: Fields[Tensor], bounds: Extents, *, scaling: float
    ) -> Tensor:
        query = query.contiguous()
        if bounds.max_query_len > 1:
            out = self._chunks(query, keys, values, self._chunk_rows(batch, bounds), bounds, scaling=scaling)
        else:
            out = torch.empty_like(query)
        return self._decodes.write(out, query, keys, values, batch, scaling)

    def _chunk_rows(self, batch: Fields[Tensor], bounds: Extents) -> Rows:
        """Returns the rows of the chunks, selected once per iteration: the layers of an iteration share one batch."""
        if batch is not self._batch or self._rows is None:
            self._batch, self._rows = batch, chunk_rows(batch, bounds)
        return self._rows
