"""PyTorch's own `varlen_attn` over pages (PyTorch 2.13 and later): no extra package; blocks of a multiple of 256 tokens."""

from __future__ import annotations

import inspect

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from cbatch.runtime.batch import Bounds, Fields

PAGE_MULTIPLE = 256


class VarlenAttention:
    """Implements `Attention` for 16-bit floats, compute capability 8.0 or above."""

    name = "torch varlen_attn"

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: Fields[Tensor], bounds: Bounds, *, scaling: float
    ) -> Tensor:
        output = varlen_attn(
            query,
            keys,
            values,
            batch.query_starts,
            None,
            bounds.max_query_len,
            bounds.max_context_len,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=batch.context_lens,
            block_table=batch.block_tables,
            num_splits=1,
        )
        assert isinstance(output, Tensor)
        return output


def takes_pages() -> bool:
    """Whether this PyTorch's `varlen_attn` reads a paged cache."""
    return "block_table" in inspect.signature(varlen_attn).parameters
