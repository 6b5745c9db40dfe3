"""A Triton kernel for attention over pages: one query of a request with its context split, or a chunk's queries in tiles.

One query takes as long as the bytes of its keys and values, so what matters is that enough programs read at once.
"Flash-decoding" (Dao et al., 2023): each attends to some of the pages and leaves its result with the logarithm of its
weight; a second kernel combines the parts. With one part there is nothing to combine. Chunks are attended to in the usual
way (FlashAttention-2, Dao 2023), on any GPU and in any float type, but not at the speed of a library made for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cbatch.runtime.attention.rows import Rows
from cbatch.runtime.batch import Fields

BLOCK = 64
"""Tokens of context that a program takes in one step, unless the pages are smaller."""

SHARED_MEMORY = 111 * 1024
"""Bytes of shared memory for the blocks in flight of one program; two programs fit on a Hopper multiprocessor."""

LOG2_E = 1.4426950408889634


@triton.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["query_starts_ptr", "query_lens_ptr", "block_tables_ptr", "context_lens_ptr"],
)
def _attention_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [tokens, heads, DIM]
    keys_ptr,  # [pages, PAGE, KV_HEADS, DIM]
    values_ptr,  # the same
    query_starts_ptr,  # [rows + 1]
    query_lens_ptr,  # [rows]; None without CHUNKS
    block_tables_ptr,  # [rows, table_width]
    context_lens_ptr,  # [rows]
    out_ptr,  # one part: [tokens, heads, DIM]; more: [rows, heads, PARTS, DIM]
    weights_ptr,  # [rows, heads, PARTS]: log2 of the sum of exponentials; unused with one part
    table_width,
    scale,  # scaling * log2(e)
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one kv head
    GROUP_SLOTS: tl.constexpr,  # the next power of two
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNKS: tl.constexpr,  # whether to compute the requests with several queries, or those with one
    PARTS: tl.constexpr,  # of the context, each a program; 1 for chunks
    BLOCK: tl.constexpr,  # divides PAGE
    BLOCK_QUERIES: tl.constexpr,  # (query, head) pairs of a program
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    kv_head, row = tl.program_id(0), tl.program_id(1)
    tile, part = (0, tl.program_id(2)) if PARTS > 1 else (tl.program_id(2), 0)
    if DEPENDENT:
        gdc_launch_dependents()
    if DEPENDENT and CHUNKS:  # rows of chunks are picked on the device, just before
        gdc_wait()
    start = tl.load(query_starts_ptr + row)
    num_queries = tl.load(query_lens_ptr + row) if CHUNKS else tl.load(query_starts_ptr + row + 1) - start
    context = tl.load(context_lens_ptr + row)
    first = tile * (BLOCK_QUERIES // GROUP_SLOTS)
    mine = ((num_queries > 1) if CHUNKS else (num_queries == 1)) & (first < num_queries)
    pairs = tl.arange(0, BLOCK_QUERIES)
    queries = first + pairs // GROUP_SLOTS
    heads = kv_head * GROUP + pairs % GROUP_SLOTS
    real = (pairs % GROUP_SLOTS < GROUP) & (queries < num_queries) & mine
    positions = context - num_queries + queries
    num_keys = tl.minimum(context - num_queries + first + BLOCK_QUERIES // GROUP_SLOTS, context)
    num_blocks = tl.where(mine, tl.cdiv(num_keys, BLOCK), 0)
    blocks_a_part = tl.cdiv(num_blocks, PARTS)
    begin = part * blocks_a_part
    end = tl.minimum(begin + blocks_a_part, num_blocks)
    last = tl.maximum(num_blocks - 1, 0)
    BLOCKS_A_PAGE: tl.constexpr = PAGE // BLOCK
    table_ptr = block_tables_ptr + row * table_width
    page = tl.load(table_ptr + tl.minimum(begin, last) // BLOCKS_A_PAGE)
    if DEPENDENT and not CHUNKS:
        gdc_wait()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    dims = tl.arange(0, DIM)[None, :]
    tokens = tl.arange(0, BLOCK)
    query = tl.load(query_ptr + ((start + queries) * HEADS + heads)[:, None] * DIM + dims, real[:, None], other=0.0)
    top = tl.full([BLOCK_QUERIES], -1e30, tl.float32)  # the greatest score so far
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    out = tl.zeros([BLOCK_QUERIES, DIM], tl.float32)
    offsets = tokens[:, None] * (KV_HEADS * DIM) + kv_head * DIM + dims
    for block in tl.range(begin, end, num_stages=STAGES):
        next_page = tl.load(table_ptr + tl.minimum(block + 1, last) // BLOCKS_A_PAGE)  # ahead of the loads that need it
        block_start = (page.to(tl.int64) * PAGE + block % BLOCKS_A_PAGE * BLOCK) * (KV_HEADS * DIM)
        keys_at = block * BLOCK + tokens
        key = tl.load(keys_ptr + block_start + offsets, (keys_at < context)[:, None], other=0.0)
        value = tl.load(values_ptr + block_start + offsets, (keys_at < context)[:, None], other=0.0)
        seen = keys_at[None, :] <= positions[:, None]
        scores = tl.where(seen, tl.dot(query, key.T, input_precision="ieee") * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        out = tl.dot(weights.to(value.dtype), value, out * shrink[:, None], input_precision="ieee")
        top = new_top
        page = next_page
    place = ((start + queries if PARTS == 1 else row) * HEADS + heads) * PARTS + part
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(
        out_ptr + place[:, None] * DIM + dims, (out / divisor[:, None]).to(out_ptr.dtype.element_ty), real[:, None]
    )
    if PARTS > 1:
        tl.store(weights_ptr + place, tl.where(total > 0, top + tl.log2(divisor), -1e30), real)


@triton.jit(do_not_specialize_on_alignment=["query_starts_ptr"])
def _combine_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,  # [rows, HEADS, PARTS, DIM]
    weights_ptr,  # [rows, HEADS, PARTS]
    query_starts_ptr,  # [rows + 1]
    out_ptr,  # [tokens, HEADS, DIM]
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1)
    parts = tl.arange(0, PARTS)
    dims = tl.arange(0, DIM)
    if DEPENDENT:
        gdc_launch_dependents()
    token = tl.load(query_starts_ptr + row)
    is_decode = tl.load(query_starts_ptr + row + 1) - token == 1
    if DEPENDENT:
        gdc_wait()
    place = (row * HEADS + head) * PARTS + parts
    weights = tl.load(weights_ptr + place)
    weights = tl.exp2(weights - tl.max(weights))
    out = tl.sum(tl.load(parts_ptr + place[:, None] * DIM + dims[None, :]) * weights[:, None], 0) / tl.sum(weights)
    tl.store(out_ptr + (token * HEADS + head) * DIM + dims, out.to(out_ptr.dtype.element_ty), (dims < DIM) & is_decode)


def attend_decodes(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Fields[torch.Tensor],
    scaling: float,
    out: torch.Tensor,
    *,
    num_parts: int,
    deep: bool,
    dependent: bool,
) -> None:
    """Attention of the requests that have one query; writes their tokens' rows of `out`, zeros for an empty context.

    Args:
        query, out: [tokens, heads, head dim].
        keys, values: [pages, page size, kv heads, head dim].
        num_parts: of each context, a power of two.
        deep: keep as many blocks in flight as the shared memory holds; better where few programs run.
        dependent: start while the kernel before still runs; needs compute capability 9.0.
    """
    num_heads, dim = query.shape[1:]
    num_rows = len(batch.context_lens)
    rows = Rows(batch.query_starts, None, batch.context_lens, batch.block_tables)
    if num_parts == 1:
        _launch(query, keys, values, rows, scaling, out, out, 1, 1, deep=deep, dependent=dependent)
        return
    parts = torch.empty((num_rows, num_heads, num_parts, dim), dtype=torch.float32, device=query.device)
    weights = torch.empty((num_rows, num_heads, num_parts), dtype=torch.float32, device=query.device)
    _launch(query, keys, values, rows, scaling, parts, weights, num_parts, 1, deep=deep, dependent=dependent)
    _combine_kernel[(num_heads, num_rows)](
        parts,
        weights,
        batch.query_starts,
        out,
        HEADS=num_heads,
        DIM=dim,
        PARTS=num_parts,
        DEPENDENT=dependent,
        num_warps=1,
        launch_pdl=dependent,
    )


def attend_chunks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: Rows,
    scaling: float,
    out: torch.Tensor,
    *,
    max_query_len: int,
    dependent: bool,
) -> None:
    """Attention of the requests that have several queries; writes their tokens' rows of `out`. See `attend_decodes`.

    max_query_len: upper bound of any request's queries.
    """
    _launch(query, keys, values, rows, scaling, out, out, 1, max_query_len, deep=False, dependent=dependent)


def _launch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: Rows,
    scaling: float,
    out: torch.Tensor,
    weights: torch.Tensor,
    num_parts: int,
    max_query_len: int,
    *,
    deep: bool,
    dependent: bool,
) -> None:
    num_heads, dim = query.shape[1:]
    page, kv_heads = keys.shape[1:3]
    num_rows, table_width = rows.block_tables.shape
    group = num_heads // kv_heads
    group_slots = triton.next_power_of_2(group)
    block_queries = max(64 if max_query_len > 1 and keys.element_size() == 2 else 16, group_slots)
    block = min(BLOCK, page)
    assert page % block == 0, f"pages of {page} tokens are no multiple of {block}"
    fitting = 1 + SHARED_MEMORY // (2 * block * dim * keys.element_size())
    num_tiles = triton.cdiv(max_query_len, block_queries // group_slots)
    _attention_kernel[(kv_heads, num_rows, num_parts * num_tiles)](
        query,
        keys,
        values,
        rows.starts,
        rows.query_lens,
        rows.block_tables,
        rows.context_lens,
        out,
        weights,
        table_width,
        scaling * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_SLOTS=group_slots,
        DIM=dim,
        PAGE=page,
        CHUNKS=max_query_len > 1,
        PARTS=num_parts,
        BLOCK=block,
        BLOCK_QUERIES=block_queries,
        STAGES=min(4 if deep else 2, fitting),
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )
