"""A Triton kernel for the attention of chunks over pages, for any GPU that Triton supports and any float type.

FlashAttention-2 (Dao 2023): one program per tile of queries. Slower than flash-attn-4, which requires Hopper.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cbatch.runtime.batch import Extents
from cbatch.runtime.fast.attention.rows import Rows
from cbatch.runtime.fast.attention.triton_blocks import LOG2_E, Sizes, attend_to_blocks, pages_of


@triton.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["query_starts_ptr", "query_lens_ptr", "block_tables_ptr", "context_lens_ptr"],
)
def _chunk_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [tokens, heads, DIM]
    keys_ptr,  # [pages, PAGE, KV_HEADS, DIM]
    values_ptr,  # the same
    query_starts_ptr,  # [rows + 1]
    query_lens_ptr,  # [rows]
    block_tables_ptr,  # [rows, table_width]
    context_lens_ptr,  # [rows]
    out_ptr,  # [tokens, heads, DIM]
    table_width,
    scale,  # scaling * log2(e)
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,  # (query, head) pairs of a program
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    kv_head, row, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()  # before any read: the device also selected the rows
    start = tl.load(query_starts_ptr + row)
    num_queries = tl.load(query_lens_ptr + row)
    context = tl.load(context_lens_ptr + row)
    first = tile * (PAIRS // PADDED_GROUP)
    if first >= num_queries:
        return
    pairs = tl.arange(0, PAIRS)
    queries = first + pairs // PADDED_GROUP
    heads = kv_head * GROUP + pairs % PADDED_GROUP
    real = ((pairs % PADDED_GROUP < GROUP) & (queries < num_queries))[:, None]
    places = ((start + queries) * (KV_HEADS * GROUP) + heads)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    positions = context - num_queries + queries
    num_blocks = tl.cdiv(tl.minimum(context - num_queries + first + PAIRS // PADDED_GROUP, context), BLOCK)
    table_ptr = block_tables_ptr + row * table_width
    query = tl.load(query_ptr + places, real, other=0.0)
    out, _ = attend_to_blocks(
        query,
        positions,
        keys_ptr,
        values_ptr,
        table_ptr,
        pages_of(table_ptr, 0, context, PAGE, BLOCK),
        0,
        num_blocks,
        0,
        context,
        kv_head,
        scale,
        KV_HEADS,
        PAIRS,
        DIM,
        PAGE,
        BLOCK,
        STAGES,
    )
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), real)


class TritonChunks:
    """Implements `Chunks`."""

    name = "triton"

    def __init__(self, *, dependent: bool) -> None:
        """dependent: start while the preceding kernel still runs; requires compute capability 9.0."""
        self._dependent = dependent

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, bounds: Extents, *, scaling: float
    ) -> Tensor:
        out = torch.empty_like(query)
        num_rows, table_width = rows.block_tables.shape
        sizes = Sizes.of(query, keys)
        pairs = max(64 if keys.element_size() == 2 else 16, sizes.padded_group)
        num_tiles = triton.cdiv(bounds.max_query_len, pairs // sizes.padded_group)
        _chunk_kernel[(sizes.kv_heads, num_rows, num_tiles)](
            query,
            keys,
            values,
            rows.starts,
            rows.query_lens,
            rows.block_tables,
            rows.context_lens,
            out,
            table_width,
            scaling * LOG2_E,
            **sizes.constants(),
            PAIRS=pairs,
            STAGES=min(2, sizes.fitting),
            DEPENDENT=self._dependent,
            num_warps=4,
            launch_pdl=self._dependent,
        )
        return out
