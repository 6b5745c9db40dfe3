"""One query a request by our own kernel, several by whoever is best at them.

A library's kernel is made for many queries. With one query a request it leaves the memory idle between its tiles, and
without splitting the context most of the GPU too.
"""

from __future__ import annotations

from typing import Protocol

import torch

from cbatch.runtime.attention import Attention
from cbatch.runtime.batch import Bounds, Fields
from cbatch.runtime.fast.attention.rows import Rows, chunk_rows
from cbatch.runtime.fast.attention.triton_decodes import Decodes


class Chunks(Protocol):
    """Attention of the requests with several queries."""

    name: str

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
        bounds: Bounds,
        *,
        scaling: float,
    ) -> torch.Tensor:
        """As an `Attention`, of these rows.

        Returns:
            [tokens, heads, head dim]; anything at the tokens of other requests.
        """
        ...


class DecodeAttention:
    """Our kernel for iterations of decodes alone, another attention for mixed ones. See `Attention`."""

    def __init__(self, mixed: Attention, decodes: Decodes) -> None:
        self.name = f"{mixed.name}, decodes alone by our kernel"
        self._mixed = mixed
        self._decodes = decodes

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Fields[torch.Tensor],
        bounds: Bounds,
        *,
        scaling: float,
    ) -> torch.Tensor:
        query = query.contiguous()
        if bounds.max_query_len > 1:
            return self._mixed(query, keys, values, batch, bounds, scaling=scaling)
        return self._decodes.write(torch.empty_like(query), query, keys, values, batch, scaling)


class SplitAttention:
    """Our kernel for all decodes; in a mixed iteration the chunks are computed apart. See `Attention`."""

    def __init__(self, chunks: Chunks, decodes: Decodes) -> None:
        self.name = f"{chunks.name}, decodes by our kernel"
        self._chunks = chunks
        self._decodes = decodes
        self._batch: Fields[torch.Tensor] | None = None
        self._rows: Rows | None = None

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Fields[torch.Tensor],
        bounds: Bounds,
        *,
        scaling: float,
    ) -> torch.Tensor:
        query = query.contiguous()
        if bounds.max_query_len > 1:
            out = self._chunks(query, keys, values, self._chunk_rows(batch, bounds), bounds, scaling=scaling)
        else:
            out = torch.empty_like(query)
        return self._decodes.write(out, query, keys, values, batch, scaling)

    def _chunk_rows(self, batch: Fields[torch.Tensor], bounds: Bounds) -> Rows:
        """Picked once an iteration: the calls of its layers share a batch."""
        if batch is not self._batch or self._rows is None:
            self._batch, self._rows = batch, chunk_rows(batch, bounds)
        return self._rows
