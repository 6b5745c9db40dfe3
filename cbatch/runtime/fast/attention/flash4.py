"""flash-attn-4 (`flash_attn.cute`): one variable-length call for the chunks of an iteration.

The first call of each configuration compiles its kernel, which takes about 2 s. Blocks of 128 tokens are fastest on Hopper,
where they are loaded as whole tiles. A tile's rows past the end of a context are masked but must be finite, so the cache
must not be poisoned with NaN.
"""

from flash_attn.cute import flash_attn_varlen_func
from torch import Tensor

from cbatch.runtime.batch import Extents
from cbatch.runtime.fast.attention.rows import Rows


class Flash4Chunks:
    """Implements `Chunks` for 16-bit floats, head dimensions up to 256, compute capability 9.0 or above."""

    name = "flash-attn-4"

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, bounds: Extents, *, scaling: float
    ) -> Tensor:
        output: Tensor
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
