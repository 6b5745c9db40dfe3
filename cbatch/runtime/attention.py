"""Attention over a paged KV cache: one small interface, several kernels behind it.

    query      tokens of all requests of the iteration, one after the other; chunks and decodes alike
    keys       [pages + 1, page size, kv heads, head dim] of one layer, the keys of this iteration already written
    values     the same
    batch      where each request's queries begin, how long its context is, and which pages hold it

A kernel knows nothing of models, streams or requests. `ReferenceAttention` is the plain one that the others are tested
against; the fast ones are in `cbatch.runtime.fast.attention`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from cbatch.runtime.batch import Bounds, Fields


class Attention(Protocol):
    """Causal, grouped-query attention of one layer.

    A request's queries are the *last* tokens of its context (aligned bottom right): query i of n sees the keys 0 to
    context_len - n + i. Query head h reads kv head h // (heads / kv heads).
    """

    name: str
    """What a run prints and stores."""

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
        """
        Args:
            query: [tokens, heads, head dim].
            keys, values: [pages + 1, page size, kv heads, head dim]; the last page belongs to padding.
            batch: `query_starts`, `context_lens` and `block_tables` are read.
            bounds: what the host knows of the rows; a kernel need not read it from the device.
            scaling: factor of the products of query and key.

        Returns:
            [tokens, heads, head dim]. What stands at padding tokens means nothing.
        """
        ...


class ReferenceAttention:
    """Paged attention in plain PyTorch: what a CPU runs, and the oracle of the other kernels.

    It gathers each request's pages into one piece and calls PyTorch's attention: the requests with one query in one padded
    call, the longer ones - prompt chunks - one by one. It reads lengths as plain numbers, so on a GPU every call waits for
    the device, and it cannot be captured in a graph.
    """

    name = "reference"

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
        output = torch.zeros_like(query)  # [tokens, heads, head dim]
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        singles = [row for row, context in enumerate(contexts) if starts[row + 1] - starts[row] == 1]
        if singles:
            rows = torch.tensor(singles, device=query.device)
            tokens = batch.query_starts[rows]
            pages = _gather(keys, values, batch.block_tables[rows], max(contexts[row] for row in singles))
            output[tokens] = _decode(query[tokens], *pages, batch.context_lens[rows], scaling)
        for row, context in enumerate(contexts):
            begin, end = starts[row], starts[row + 1]
            if end - begin > 1:
                pages = _gather(keys, values, batch.block_tables[row : row + 1], context)
                output[begin:end] = _chunk(query[begin:end], *pages, scaling)
        return output


def _gather(
    keys: torch.Tensor, values: torch.Tensor, block_tables: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the first `length` keys and values of some requests, [rows, kv heads, length, head dim] each."""
    page_size = keys.shape[1]
    tables = block_tables[:, : -(-length // page_size)]
    first, second = (pages[tables].flatten(1, 2)[:, :length].transpose(1, 2) for pages in (keys, values))
    return first, second


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context_lens: torch.Tensor, scaling: float
) -> torch.Tensor:
    """One query of each request, [rows, heads, head dim], against its own context, padded to the longest.

    What lies beyond a context may be anything, NaN too; it is zeroed as well as masked, since 0 * NaN is not 0. Keys and
    values are copies, so that may be done in place.
    """
    beyond = torch.arange(keys.shape[2], device=keys.device) >= context_lens[:, None]  # [rows, length]
    for part in (keys, values):
        part.masked_fill_(beyond[:, None, :, None], 0)
    seen = ~beyond[:, None, None, :]  # [rows, 1, 1, length]
    query = query[:, :, None]  # [rows, heads, 1, head dim]
    return scaled_dot_product_attention(query, keys, values, seen, scale=scaling, enable_gqa=True)[:, :, 0]


def _chunk(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """The last queries of one request, [tokens, heads, head dim], against the keys up to their own."""
    num_queries, num_keys = query.shape[0], keys.shape[2]
    position = torch.arange(num_keys - num_queries, num_keys, device=query.device)
    seen = torch.arange(num_keys, device=query.device) <= position[:, None]  # [queries, keys]
    query = query.transpose(0, 1)[None]  # [1, heads, tokens, head dim]
    return scaled_dot_product_attention(query, keys, values, seen, scale=scaling, enable_gqa=True)[0].transpose(0, 1)
