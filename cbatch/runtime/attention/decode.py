"""One query a request by our own kernel, several by whoever is best at them.

A library's kernel is made for many queries. With one query a request it leaves the memory idle between its tiles, and
without splitting the context most of the GPU too.
"""

from __future__ import annotations

from typing import Protocol

import torch

from cbatch.runtime.attention import Attention
from cbatch.runtime.attention.triton_kernel import BLOCK, attend_chunks, attend_decodes
from cbatch.runtime.batch import Fields


class Chunks(Protocol):
    """Attention that can leave requests out."""

    name: str

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Fields[torch.Tensor],
        query_lens: torch.Tensor,
        *,
        scaling: float,
        max_query_len: int,
        max_context_len: int,
    ) -> torch.Tensor:
        """As an `Attention` of the requests with several queries.

        Args:
            query_lens: int32 [rows]; queries of each of them, 0 for a request to be left out.

        Returns:
            [tokens, heads, head dim]; anything at the tokens of requests left out.
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
        scaling: float,
        max_context_len: int,
    ) -> torch.Tensor:
        """Write their tokens' rows of `out`, [tokens, heads, head dim], and return it."""
        num_contexts = len(batch.context_lens) * keys.shape[2]
        num_parts = self._num_parts(num_contexts, -(-max_context_len // BLOCK))
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
        *,
        scaling: float,
        max_query_len: int,
        max_context_len: int,
    ) -> torch.Tensor:
        query = query.contiguous()
        if max_query_len > 1:
            return self._mixed(query, keys, values, batch, scaling=scaling, max_query_len=max_query_len,
                               max_context_len=max_context_len)  # fmt: skip
        return self._decodes.write(torch.empty_like(query), query, keys, values, batch, scaling, max_context_len)


class SplitAttention:
    """Our kernel for all decodes; in a mixed iteration the chunks are computed apart. See `Attention`."""

    def __init__(self, chunks: Chunks, decodes: Decodes) -> None:
        self.name = f"{chunks.name}, decodes by our kernel"
        self._chunks = chunks
        self._decodes = decodes
        self._batch: Fields[torch.Tensor] | None = None
        self._query_lens = torch.empty(0)

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Fields[torch.Tensor],
        *,
        scaling: float,
        max_query_len: int,
        max_context_len: int,
    ) -> torch.Tensor:
        query = query.contiguous()
        if max_query_len > 1:
            out = self._chunks(query, keys, values, batch, self._lens(batch), scaling=scaling, max_query_len=max_query_len,
                               max_context_len=max_context_len)  # fmt: skip
        else:
            out = torch.empty_like(query)
        return self._decodes.write(out, query, keys, values, batch, scaling, max_context_len)

    def _lens(self, batch: Fields[torch.Tensor]) -> torch.Tensor:
        """Queries of each chunk, 0 for a decode. Made once an iteration: the calls of its layers share a batch."""
        if batch is not self._batch:
            lens = batch.query_starts.diff()
            self._batch, self._query_lens = batch, torch.where(lens > 1, lens, 0)
        return self._query_lens


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
        batch: Fields[torch.Tensor],
        query_lens: torch.Tensor,
        *,
        scaling: float,
        max_query_len: int,
        max_context_len: int,
    ) -> torch.Tensor:
        out = torch.empty_like(query)
        attend_chunks(query, keys, values, batch, scaling, out, max_query_len=max_query_len, dependent=self._dependent)
        return out
