"""A Triton kernel for the attention of decodes over pages: memory-bound for any distribution of context lengths.

One query takes as long as reading its keys and values, so every multiprocessor should always be reading. The blocks of
all contexts form one line, and each program takes an equal share of the line. A long context is spread over many
programs ("Flash-decoding", Dao et al., 2023); a short context is a part of one program's share ("Stream-K", Osama et al.,
PPoPP 2023). Each program stores its part of a split context with the logarithm of the part's weight, and the last program
to finish combines the parts. The number of programs depends only on the GPU: rows of padding or of chunks cost nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cbatch.runtime.batch import Fields
from cbatch.runtime.fast.attention.triton_blocks import (
    LOG2_E,
    PROGRAMS,
    Sizes,
    attend_to_blocks,
    combine,
    pages_of,
    prefetch,
)

LEAST_BLOCKS = 4
"""Fewest blocks per share, unless a multiprocessor would then have no share. Some programs get no share."""

STAGES = 3  # most steps in flight, as far as shared memory allows
LEAST_ROWS = 128  # fewest rows that the kernel is compiled for; all smaller batches use one compiled kernel


@triton.jit(
    do_not_specialize=["num_rows", "table_width"],
    do_not_specialize_on_alignment=["query_starts_ptr", "block_tables_ptr", "context_lens_ptr", "drafts_ptr"],
)
def _decode_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [tokens, heads, DIM]
    keys_ptr,  # [pages, PAGE, KV_HEADS, DIM]
    values_ptr,  # the same
    query_starts_ptr,  # [num_rows + 1]
    block_tables_ptr,  # [num_rows, table_width]
    context_lens_ptr,  # [num_rows]
    drafts_ptr,  # [num_rows]: place of each row among those of its request, which share one read of the context
    out_ptr,  # [tokens, heads, DIM]
    parts_ptr,  # [shares * TILE + num_rows, heads, DIM]
    weights_ptr,  # [shares * TILE + num_rows, heads]: log2 of the sum of exponentials
    arrived_ptr,  # [shares, KV_HEADS]: stored parts of the context that begins in a share; 0 between calls
    num_rows,
    table_width,
    scale,  # scaling * log2(e)
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, num_rows or more
    LEAST_BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr,  # per multiprocessor
    PAIRS: tl.constexpr,  # queries and heads of the group, padded to the size of a tensor core's operand
    TILE: tl.constexpr,  # most rows that are read together; 1 without drafts
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    kv_head, share = tl.program_id(0), tl.program_id(1)
    if DEPENDENT:
        gdc_launch_dependents()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    rows = tl.arange(0, ROWS)
    starts = tl.load(query_starts_ptr + rows, rows < num_rows, other=0)
    contexts = tl.load(context_lens_ptr + rows, rows < num_rows, other=0)
    leads = tl.load(query_starts_ptr + rows + 1, rows < num_rows, other=0) - starts == 1
    more = tl.zeros([ROWS], tl.int32)  # rows that follow and are read with this one
    if TILE > 1:
        draft = tl.load(drafts_ptr + rows, rows < num_rows, other=0)
        for ahead in tl.static_range(1, TILE):
            following = tl.load(drafts_ptr + rows + ahead, rows + ahead < num_rows, other=0)
            more += (following == draft + ahead).to(tl.int32)
        leads = leads & (draft % TILE == 0)
    blocks = tl.where(leads, tl.cdiv(contexts + more, BLOCK), 0)
    ends = tl.cumsum(blocks)
    num_blocks = tl.sum(blocks)
    one_each = tl.minimum(tl.num_programs(1) // PROGRAMS, num_blocks)
    num_shares = tl.maximum(tl.minimum(tl.num_programs(1), tl.maximum(num_blocks // LEAST_BLOCKS, one_each)), 1)
    num_shares = _align(num_shares, tl.maximum(tl.sum((blocks > 0).to(tl.int32)), 1))
    at = num_blocks * tl.minimum(share, num_shares) // num_shares
    stop = num_blocks * tl.minimum(share + 1, num_shares) // num_shares
    # If requests share a prefix, half of the programs find the prefix in the L2 cache while the others read memory.
    backwards = share % 2
    after = tl.arange(0, PAIRS) // PADDED_GROUP
    in_group = tl.arange(0, PAIRS) % PADDED_GROUP < GROUP
    heads = after * HEADS + kv_head * GROUP + tl.arange(0, PAIRS) % PADDED_GROUP
    places = heads[:, None] * DIM + tl.arange(0, DIM)[None, :]
    next_row, next_begin, next_token, next_context, next_others, next_block, next_page = _find(
        at,
        stop,
        backwards,
        blocks,
        ends,
        more,
        num_blocks,
        query_starts_ptr,
        context_lens_ptr,
        block_tables_ptr,
        table_width,
        ROWS,
        PAGE,
        BLOCK,
        TILE,
    )
    if DEPENDENT:
        if at < stop:
            prefetch(keys_ptr, values_ptr, next_page, next_block, kv_head, KV_HEADS, DIM, PAGE, BLOCK)
        gdc_wait()
    next_real = in_group & (after <= next_others)
    next_query = tl.load(query_ptr + next_token * (HEADS * DIM) + places, next_real[:, None], other=0.0)
    while at < stop:
        row, begin, token, context, page, query = next_row, next_begin, next_token, next_context, next_page, next_query
        others, real = next_others, next_real
        end = begin + tl.cdiv(context + others, BLOCK)
        until = tl.minimum(end, stop)
        # The next context is loaded during the attention to this context.
        next_row, next_begin, next_token, next_context, next_others, next_block, next_page = _find(
            until,
            stop,
            backwards,
            blocks,
            ends,
            more,
            num_blocks,
            query_starts_ptr,
            context_lens_ptr,
            block_tables_ptr,
            table_width,
            ROWS,
            PAGE,
            BLOCK,
            TILE,
        )
        next_real = in_group & (after <= next_others)
        next_query = tl.load(query_ptr + next_token * (HEADS * DIM) + places, next_real[:, None], other=0.0)
        part, weight = attend_to_blocks(
            query,
            context - 1 + after,
            keys_ptr,
            values_ptr,
            block_tables_ptr + row * table_width,
            page,
            at - begin,
            until - begin,
            backwards,
            context + others,
            kv_head,
            scale,
            KV_HEADS,
            PAIRS,
            DIM,
            PAGE,
            BLOCK,
            STAGES,
        )
        first_share = ((begin + 1) * num_shares - 1) // num_blocks
        last_share = (end * num_shares - 1) // num_blocks
        if first_share == last_share:
            tl.store(out_ptr + token * (HEADS * DIM) + places, part.to(out_ptr.dtype.element_ty), real[:, None])
        else:
            place = share * TILE + row  # unique to this part: share and row only grow along the line
            tl.store(parts_ptr + place * (HEADS * DIM) + places, part, real[:, None])
            tl.store(weights_ptr + place * HEADS + heads, weight, real)
            tl.debug_barrier()
            arrived_at = arrived_ptr + first_share * KV_HEADS + kv_head
            if tl.atomic_add(arrived_at, 1, sem="acq_rel") == last_share - first_share:
                tl.store(arrived_at, 0)
                for number in range(others + 1):
                    head = (first_share * TILE + row + number) * HEADS + kv_head * GROUP
                    combine(
                        parts_ptr + head * DIM,
                        weights_ptr + head,
                        last_share - first_share + 1,
                        out_ptr + ((token + number) * HEADS + kv_head * GROUP) * DIM,
                        TILE * HEADS,
                        GROUP,
                        PADDED_GROUP,
                        DIM,
                    )
        at = until


@triton.jit
def _align(num_shares, num_decodes):  # type: ignore[no-untyped-def]
    """May return slightly fewer shares, so that contexts of equal length split at share borders: fewer parts to combine."""
    contexts = tl.cdiv(num_decodes, num_shares)  # per share
    aligned = tl.where(contexts > 1, tl.cdiv(num_decodes, contexts), num_shares - num_shares % num_decodes)
    return tl.where(aligned * 16 >= num_shares * 15, aligned, num_shares)


@triton.jit
def _find(  # type: ignore[no-untyped-def]
    at,
    stop,
    backwards,
    blocks,
    ends,
    more,
    num_blocks,
    query_starts_ptr,
    context_lens_ptr,
    block_tables_ptr,
    table_width,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns the row at a place of the line, its first place, token and context, the number of rows that are read with it, the block to
    read first, and the block's `pages_of`."""
    at = tl.minimum(at, num_blocks - 1)
    row = tl.sum((ends <= at).to(tl.int32))
    begin = tl.sum(tl.where(tl.arange(0, ROWS) < row, blocks, 0))
    context = tl.load(context_lens_ptr + row)
    others = tl.sum(tl.where(tl.arange(0, ROWS) == row, more, 0)) if TILE > 1 else row * 0
    whole = context + others
    last = tl.minimum(begin + tl.cdiv(whole, BLOCK), stop) - 1
    block = tl.maximum(at + backwards * (last - at) - begin, 0)
    page = pages_of(block_tables_ptr + row * table_width, block, tl.maximum(whole, 1), PAGE, BLOCK)
    return row, begin, tl.load(query_starts_ptr + row), context, others, block, page


class Decodes:
    """Attention of the rows with one query, in any iteration. See `triton_blocks` for the supported sizes."""

    def __init__(self, device: torch.device, *, drafts: bool = False) -> None:
        """drafts: whether a request may have several rows, which then share one read of its context."""
        self._drafts = drafts
        properties = torch.cuda.get_device_properties(device)
        self._dependent = properties.major >= 9  # start while the preceding kernel still runs
        self._num_programs = PROGRAMS * properties.multi_processor_count
        self._arrived = torch.zeros(self._num_programs, dtype=torch.int32, device=device)

    def write(
        self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, batch: Fields[Tensor], scaling: float
    ) -> Tensor:
        """Writes the tokens of rows with one query to `out`, and returns `out`. Calls must not overlap, since they share a counter.

        Args:
            out, query: [tokens, heads, head dim], contiguous.
            keys, values: [pages, page size, kv heads, head dim].
        """
        sizes = Sizes.of(query, keys)
        num_rows, table_width = batch.block_tables.shape
        num_heads = query.shape[1]
        num_shares = max(1, self._num_programs // sizes.kv_heads)
        pairs = max(16, sizes.padded_group)
        tile = pairs // sizes.padded_group if self._drafts else 1
        num_places = num_shares * tile + num_rows
        parts = torch.empty((num_places, num_heads, sizes.dim), dtype=torch.float32, device=query.device)
        weights = torch.empty((num_places, num_heads), dtype=torch.float32, device=query.device)
        _decode_kernel[(sizes.kv_heads, num_shares)](
            query,
            keys,
            values,
            batch.query_starts,
            batch.block_tables,
            batch.context_lens,
            batch.drafts,
            out,
            parts,
            weights,
            self._arrived,
            num_rows,
            table_width,
            scaling * LOG2_E,
            **sizes.constants(),
            ROWS=max(LEAST_ROWS, triton.next_power_of_2(num_rows)),
            LEAST_BLOCKS=LEAST_BLOCKS,
            PROGRAMS=PROGRAMS,
            PAIRS=pairs,
            TILE=tile,
            STAGES=min(STAGES, sizes.fitting),
            DEPENDENT=self._dependent,
            num_warps=4,
            launch_pdl=self._dependent,
        )
        return out
