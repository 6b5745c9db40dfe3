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
