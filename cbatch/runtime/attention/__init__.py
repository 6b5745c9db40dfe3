"""Attention over a paged KV cache: one small interface, several kernels behind it.

    query      tokens of all requests of the iteration, one after the other; chunks and decodes alike
    keys       [pages + 1, page size, kv heads, head dim] of one layer, the keys of this iteration already written
    values     the same
    batch      where each request's queries begin, how long its context is, and which pages hold it

A kernel knows nothing of models, streams or requests. `reference` is the plain one that the others are tested against.
"""

from __future__ import annotations

from typing import Protocol

import torch

from cbatch.runtime.batch import Fields


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
        *,
        scaling: float,
        max_query_len: int,
        max_context_len: int,
    ) -> torch.Tensor:
        """
        Args:
            query: [tokens, heads, head dim].
            keys, values: [pages + 1, page size, kv heads, head dim]; the last page belongs to padding.
            batch: `query_starts`, `context_lens` and `block_tables` are read.
            scaling: factor of the products of query and key.
            max_query_len, max_context_len: upper bounds of any row's queries and context. Plain numbers, so that a kernel
                need not read the device; in a captured graph they are those of the graph's shape.

        Returns:
            [tokens, heads, head dim]. What stands at padding tokens means nothing.
        """
        ...
