"""flash-attn 2 (`flash_attn`) for Ampere and later: one variable-length call; block sizes are multiples of 256 tokens."""

from __future__ import annotations

import torch
from flash_attn import flash_attn_varlen_func
from torch import Tensor

from cbatch.runtime.batch import Bounds, Fields

PAGE_MULTIPLE = 256


class Flash2Attention:
    """Implements `Attention` for 16-bit floats, head dimensions up to 256, compute capability 8.0 or above."""

    name = "flash-attn-2"

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: Fields[Tensor], bounds: Bounds, *, scaling: float
    ) -> Tensor:
        ends = torch.nn.functional.pad(batch.context_lens.cumsum(0, dtype=torch.int32), (1, 0))  # read as lengths
        output: Tensor = flash_attn_varlen_func(
            query,
            keys,
            values,
            cu_seqlens_q=batch.query_starts,
            cu_seqlens_k=ends,
            max_seqlen_q=bounds.max_query_len,
            max_seqlen_k=bounds.max_context_len,
            softmax_scale=scaling,
            causal=True,
            block_table=batch.block_tables,
        )
        return output
