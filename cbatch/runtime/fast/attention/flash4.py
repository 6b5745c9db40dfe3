"""flash-attn-4 (`flash_attn.cute`): one variable-length call over the pages for the chunks of an iteration.

Compiles its kernel at the first call of a configuration, about 2 s. Pages of 128 tokens are its fastest on Hopper: they
are loaded as whole tiles. A tile's rows past the end of a context are masked but must be finite, so the cache may not be
poisoned with NaN.
"""

from __future__ import annotations

import torch
from flash_attn.cute import flash_attn_varlen_func

from cbatch.runtime.batch import Bounds
from cbatch.runtime.fast.attention.rows import Rows


class Flash4Chunks:
    """See `Chunks`. 16-bit floats, head dimensions up to 256, compute capability 9.0 or above."""

    name = "flash-attn-4"

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
        output: torch.Tensor
        output, _ = flash_attn_varlen_func(
            query,
            keys,
            values,
            cu_seqlens_q=rows.starts,
            seqused_q=rows.query_lens,
            seqused_k=rows.context_lens,
            page_table=rows.block_tables,
            max_seqlen_q=bounds.max_query_len,
            max_seqlen_k=bounds.max_context_len,
            softmax_scale=scaling,
            causal=True,
        )
        return output
