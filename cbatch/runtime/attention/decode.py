"""One query a request by our own kernel, several by whoever is best at them.

A library's kernel is made for many queries. With one query a request it leaves the memory idle between its tiles, and
without splitting the context most of the GPU too.
"""

from __future__ import annotations

from typing import Protocol

import torch

from cbatch.runtime.attention import Attention
from cbatch.runtime.attention.rows import Rows, chunk_rows
from cbatch.runtime.attention.triton_kernel import BLOCK, attend_chunks, attend_decodes
from cbatch.runtime.batch import Bounds, Fields


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


class Decodes:
    """Attention of the requests with one query."""

    def __init__(self, num_processors: int, *, dependent: bool) -> None:
        """
        Args:
            num_processors: multiprocessors of the GPU.
            dependent: start while the kernel before still runs; needs compute capability 9.0.
        """
        self._num_processors = num_processors
        self._dependent = dependent

    def write(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Fields[torch.Tensor],
        bounds: Bounds,
        scaling: float,
    ) -> torch.Tensor:
        """Write their tokens' rows of `out`, [tokens, heads, head dim], and return it."""
        num_contexts = len(batch.context_lens) * keys.shape[2]
        num_parts = self._num_parts(num_contexts, -(-bounds.max_context_len // BLOCK))
        deep = num_contexts * num_parts <= 2 * self._num_processors
        attend_decodes(
            query, keys, values, batch, scaling, out, num_parts=num_parts, deep=deep, dependent=self._dependent
        )
        return out

    def _num_parts(self, num_contexts: int, num_blocks: int) -> int:
        """Parts of each context, a power of two: two programs on every multiprocessor, and two blocks each at least."""
        parts = 1
        while parts * num_contexts <= self._num_processors and 4 * parts <= num_blocks:
            parts *= 2
        return parts


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
        return self._decodes.write(torch.empty_like(query), query, keys, values, batch, bounds, scaling)


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
        return self._decodes.write(out, query, keys, values, batch, bounds, scaling)

    def _chunk_rows(self, batch: Fields[torch.Tensor], bounds: Bounds) -> Rows:
        """Picked once an iteration: the calls of its layers share a batch."""
        if batch is not self._batch or self._rows is None:
            self._batch, self._rows = batch, chunk_rows(batch, bounds)
        return self._rows


class TritonChunks:
    """Our kernel for chunks too: any GPU that Triton compiles for, any float type. See `Chunks`.

    Head dimensions are powers of two, 16 or more; pages are multiples of `BLOCK` tokens, or smaller powers of two.
    """

    name = "triton"

    def __init__(self, *, dependent: bool) -> None:
        """dependent: as in `Decodes`."""
        self._dependent = dependent

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
        out = torch.empty_like(query)
        attend_chunks(
            query, keys, values, rows, scaling, out, max_query_len=bounds.max_query_len, dependent=self._dependent
        )
        return out
