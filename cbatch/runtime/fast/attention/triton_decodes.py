"""A Triton kernel for the attention of decodes over pages, as fast as the memory however their contexts are spread.

One query takes as long as the bytes of its keys and values, so what matters is that every multiprocessor reads all the
time. The blocks of all contexts stand in one line, and each program takes an equal share of the line: a long context is
spread over many programs ("Flash-decoding", Dao et al., 2023), a short one is a part of one program's share ("Stream-K",
Osama et al., PPoPP 2023). Each leaves its part of a shared context with the logarithm of its weight, and whoever
comes last combines them. The number of programs depends on the GPU alone: rows of padding or of chunks cost nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cbatch.runtime.batch import Fields
from cbatch.runtime.fast.attention.triton_blocks import LOG2_E, Sizes, attend_to_blocks


class Tuning(NamedTuple):
    """How the work is cut.

    programs: on one multiprocessor.
    block: tokens of a step.
    stages: steps in flight, if the shared memory holds them.
    registers: of a thread, at most; None: as many as the compiler likes.
    """

    programs: int
    block: int
    stages: int
    registers: int | None


FEW_HEADS = Tuning(programs=2, block=64, stages=4, registers=None)
MANY_HEADS = Tuning(programs=4, block=32, stages=3, registers=128)
"""For models with many kv heads: a program reads one head's keys, which lie a row of all heads apart, and each head's line is
cut into few shares. Found by measurement on an H200: with the 40 of LLaMA-13B 5% faster than the other way, with the 8 of
Llama 3.1 8B 3 to 9% slower."""

LEAST_FOR_MANY = 16
"""Kv heads from which on that way is taken; between what was measured."""

LEAST_BLOCKS = 4
"""Fewest blocks of a share: where there are too few for that, some programs go without."""

LEAST_ROWS = 128
"""Fewest rows that the kernel is compiled for: all batches up to that share what was compiled."""


@triton.jit(
    do_not_specialize=["num_rows", "table_width"],
    do_not_specialize_on_alignment=["query_starts_ptr", "block_tables_ptr", "context_lens_ptr"],
)
def _decode_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [tokens, heads, DIM]
    keys_ptr,  # [pages, PAGE, KV_HEADS, DIM]
    values_ptr,  # the same
    query_starts_ptr,  # [num_rows + 1]
    block_tables_ptr,  # [num_rows, table_width]
    context_lens_ptr,  # [num_rows]
    out_ptr,  # [tokens, heads, DIM]
    parts_ptr,  # [shares + num_rows, heads, DIM]
    weights_ptr,  # [shares + num_rows, heads]: log2 of the sum of exponentials
    arrived_ptr,  # [shares, KV_HEADS]: parts there of the context that a share is the first of; 0 between calls
    num_rows,
    table_width,
    scale,  # scaling * log2(e)
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, num_rows or more
    LEAST_BLOCKS: tl.constexpr,
    PAIRS: tl.constexpr,  # heads of the group, padded to what a tensor core takes
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
    is_decode = tl.load(query_starts_ptr + rows + 1, rows < num_rows, other=0) - starts == 1
    blocks = tl.where(is_decode, tl.cdiv(contexts, BLOCK), 0)
    ends = tl.cumsum(blocks)
    num_blocks = tl.sum(blocks)
    num_shares = tl.maximum(tl.minimum(tl.num_programs(1), num_blocks // LEAST_BLOCKS), 1)
    at = num_blocks * tl.minimum(share, num_shares) // num_shares
    stop = num_blocks * tl.minimum(share + 1, num_shares) // num_shares
    heads = kv_head * GROUP + tl.arange(0, PAIRS)
    real = (tl.arange(0, PAIRS) < GROUP)[:, None]
    places = heads[:, None] * DIM + tl.arange(0, DIM)[None, :]
    next_row, next_begin, next_token, next_context, next_page = _find(
        at,
        blocks,
        ends,
        num_blocks,
        query_starts_ptr,
        context_lens_ptr,
        block_tables_ptr,
        table_width,
        ROWS,
        PAGE // BLOCK,
    )
    if DEPENDENT:
        gdc_wait()
    next_query = tl.load(query_ptr + next_token * (HEADS * DIM) + places, real, other=0.0)
    while at < stop:
        row, begin, token, context, page, query = next_row, next_begin, next_token, next_context, next_page, next_query
        end = begin + tl.cdiv(context, BLOCK)
        until = tl.minimum(end, stop)
        # What comes next is loaded while this context is attended to.
        next_row, next_begin, next_token, next_context, next_page = _find(
            until,
            blocks,
            ends,
            num_blocks,
            query_starts_ptr,
            context_lens_ptr,
            block_tables_ptr,
            table_width,
            ROWS,
            PAGE // BLOCK,
        )
        next_query = tl.load(query_ptr + next_token * (HEADS * DIM) + places, real, other=0.0)
        part, weight = attend_to_blocks(
            query,
            tl.full([PAIRS], 0, tl.int32) + context - 1,
            keys_ptr,
            values_ptr,
            block_tables_ptr + row * table_width,
            page,
            at - begin,
            until - begin,
            end - begin - 1,
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
        first_share = ((begin + 1) * num_shares - 1) // num_blocks
        last_share = (end * num_shares - 1) // num_blocks
        if first_share == last_share:
            tl.store(out_ptr + token * (HEADS * DIM) + places, part.to(out_ptr.dtype.element_ty), real)
        else:
            place = share + row  # no other part's: along the line both only grow
            tl.store(parts_ptr + place * (HEADS * DIM) + places, part, real)
            tl.store(weights_ptr + place * HEADS + heads, weight, tl.arange(0, PAIRS) < GROUP)
            tl.debug_barrier()
            arrived_at = arrived_ptr + first_share * KV_HEADS + kv_head
            if tl.atomic_add(arrived_at, 1, sem="acq_rel") == last_share - first_share:
                tl.store(arrived_at, 0)
                head = (first_share + row) * HEADS + kv_head * GROUP
                _combine(
                    parts_ptr + head * DIM,
                    weights_ptr + head,
                    last_share - first_share + 1,
                    out_ptr + (token * HEADS + kv_head * GROUP) * DIM,
                    HEADS,
                    GROUP,
                    GROUP_SLOTS,
                    DIM,
                )
        at = until


@triton.jit
def _find(  # type: ignore[no-untyped-def]
    at,
    blocks,
    ends,
    num_blocks,
    query_starts_ptr,
    context_lens_ptr,
    block_tables_ptr,
    table_width,
    ROWS: tl.constexpr,
    BLOCKS_A_PAGE: tl.constexpr,
):
    """Whose block stands at a place of the line, or at its end: row, its first place, token and context; and the page."""
    at = tl.minimum(at, num_blocks - 1)
    row = tl.sum((ends <= at).to(tl.int32))
    begin = tl.sum(tl.where(tl.arange(0, ROWS) < row, blocks, 0))
    page = tl.load(block_tables_ptr + row * table_width + tl.maximum(at - begin, 0) // BLOCKS_A_PAGE)
    return row, begin, tl.load(query_starts_ptr + row), tl.load(context_lens_ptr + row), page


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    parts_ptr,  # first part of a group's heads, [GROUP, DIM]; the next one follows after HEADS * DIM
    weights_ptr,  # their weights, [GROUP]; the next ones follow after HEADS
    num_parts,
    out_ptr,  # [GROUP, DIM]
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Add up the parts by their weights. Other programs wrote them, so they are read past this multiprocessor's cache."""
    PARTS: tl.constexpr = 64 // GROUP_SLOTS if GROUP_SLOTS < 32 else 2  # at a time; what the registers hold
    heads = tl.arange(0, GROUP_SLOTS)
    places = heads[:, None] * DIM + tl.arange(0, DIM)[None, :]
    top = tl.full([GROUP_SLOTS], -1e30, tl.float32)
    total = tl.zeros([GROUP_SLOTS], tl.float32)
    out = tl.zeros([GROUP_SLOTS, DIM], tl.float32)
    for begin in range(0, num_parts, PARTS):
        parts = begin + tl.arange(0, PARTS)
        real = (parts < num_parts)[:, None] & (heads < GROUP)[None, :]
        weights = tl.load(weights_ptr + parts[:, None] * HEADS + heads, real, other=-1e30, cache_modifier=".cg")
        values = tl.load(
            parts_ptr + parts[:, None, None] * (HEADS * DIM) + places, real[:, :, None], other=0.0, cache_modifier=".cg"
        )
        new_top = tl.maximum(top, tl.max(weights, 0))
        shrink = tl.exp2(top - new_top)
        shares = tl.exp2(weights - new_top)
        total = total * shrink + tl.sum(shares, 0)
        out = out * shrink[:, None] + tl.sum(values * shares[:, :, None], 0)
        top = new_top
    tl.store(out_ptr + places, (out / total[:, None]).to(out_ptr.dtype.element_ty), (heads < GROUP)[:, None])


class Decodes:
    """Attention of the requests with one query, in any iteration. See `triton_blocks` for the sizes that it takes."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._num_processors = properties.multi_processor_count
        self._dependent = properties.major >= 9  # start while the kernel before still runs
        most = max(FEW_HEADS.programs, MANY_HEADS.programs) * self._num_processors
        self._arrived = torch.zeros(most, dtype=torch.int32, device=device)

    def write(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Fields[torch.Tensor],
        scaling: float,
    ) -> torch.Tensor:
        """Write their tokens' rows of `out` and return it. Calls come one after the other, on one stream at a time.

        Args:
            out, query: [tokens, heads, head dim], contiguous.
            keys, values: [pages, page size, kv heads, head dim].
        """
        tuning = MANY_HEADS if keys.shape[2] >= LEAST_FOR_MANY else FEW_HEADS
        sizes = Sizes.of(query, keys, block=tuning.block, programs=tuning.programs)
        num_rows, table_width = batch.block_tables.shape
        num_heads = query.shape[1]
        num_shares = max(1, tuning.programs * self._num_processors // sizes.kv_heads)
        num_places = num_shares + num_rows
        parts = torch.empty((num_places, num_heads, sizes.dim), dtype=torch.float32, device=query.device)
        weights = torch.empty((num_places, num_heads), dtype=torch.float32, device=query.device)
        _decode_kernel[(sizes.kv_heads, num_shares)](
            query,
            keys,
            values,
            batch.query_starts,
            batch.block_tables,
            batch.context_lens,
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
            PAIRS=max(16, sizes.group_slots),
            STAGES=min(tuning.stages, sizes.fitting),
            DEPENDENT=self._dependent,
            num_warps=4,
            maxnreg=tuning.registers,
            launch_pdl=self._dependent,
        )
        return out
