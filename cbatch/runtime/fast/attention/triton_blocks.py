"""The common part of our attention kernels: queries attend to a range of blocks in one request's pages."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"""Tokens of context that a program processes in one step. Page sizes are multiples of BLOCK, or in `SMALL_PAGES`."""

PROGRAMS = 2  # programs per multiprocessor
SMALL_PAGES = (16, 32)  # page sizes below BLOCK; a step then covers several pages
LEAST_DIM = 16  # smallest head dimension; head dimensions are powers of two
SHARED_MEMORY = 222 * 1024  # bytes of shared memory for the blocks in flight on one multiprocessor (Hopper has 228 KB)

LOG2_E = 1.4426950408889634


@triton.jit
def pages_of(  # type: ignore[no-untyped-def]
    table_ptr,  # pages of the request
    block,
    context,  # tokens of the request
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns the page of a block or, with smaller pages, the page of each token, [BLOCK]. Past the context: its last page."""
    last = (context - 1) // PAGE
    index = (block * BLOCK + tl.arange(0, BLOCK)) // PAGE if PAGE < BLOCK else block // (PAGE // BLOCK)
    return tl.load(table_ptr + tl.minimum(index, last))


@triton.jit
def tokens_of(page, block, STRIDE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the cache offsets of a block's tokens, [BLOCK, 1]. page: `pages_of` the block. STRIDE: elements per token."""
    tokens = tl.arange(0, BLOCK)[:, None]
    if PAGE < BLOCK:
        begin = (page.to(tl.int64)[:, None] * PAGE + tokens % PAGE) * STRIDE
    else:
        begin = (page.to(tl.int64) * PAGE + block % (PAGE // BLOCK) * BLOCK) * STRIDE + tokens * STRIDE
    return begin


@triton.jit
def prefetch(  # type: ignore[no-untyped-def]
    keys_ptr,
    values_ptr,
    page,
    block,
    kv_head,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Starts reading a block into the L2 cache, in lines of 128 bytes. Concurrent writes by another kernel are not lost."""
    LINE: tl.constexpr = 1024 // keys_ptr.dtype.element_ty.primitive_bitwidth
    within = kv_head * DIM + tl.arange(0, DIM // LINE if DIM > LINE else 1)[None, :] * LINE
    lines = tokens_of(page, block, KV_HEADS * DIM, PAGE, BLOCK) + within
    CODE: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    for_keys, for_values = (keys_ptr + lines).to(tl.int64), (values_ptr + lines).to(tl.int64)
    tl.inline_asm_elementwise(CODE, "=r,l", [for_keys], dtype=tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(CODE, "=r,l", [for_values], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def attend_to_blocks(  # type: ignore[no-untyped-def]
    query,  # [PAIRS, DIM]; a pair is a query and a head
    positions,  # [PAIRS]; of each query in its request
    keys_ptr,  # [pages, PAGE, KV_HEADS, DIM]
    values_ptr,  # the same
    table_ptr,  # pages of the request
    page,  # `pages_of` the block to begin with, loaded ahead
    begin,  # first block
    end,  # the block after the last
    backwards,  # 1: begin with the last block; else 0
    context,  # tokens of the request
    kv_head,
    scale,  # scaling * log2(e)
    KV_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,  # divides PAGE, or is a multiple of it
    STAGES: tl.constexpr,
):
    """Returns the attention over only these blocks, [PAIRS, DIM], and log2 of its sum of exponentials, [PAIRS]."""
    tokens = tl.arange(0, BLOCK)
    within = kv_head * DIM + tl.arange(0, DIM)[None, :]
    top = tl.full([PAIRS], -1e30, tl.float32)  # the greatest score so far
    total = tl.zeros([PAIRS], tl.float32)
    out = tl.zeros([PAIRS, DIM], tl.float32)
    for index in tl.range(begin, end, num_stages=STAGES):
        block = index + backwards * (begin + end - 1 - 2 * index)
        next_block = tl.maximum(block + 1 - 2 * backwards, 0)
        next_page = pages_of(table_ptr, next_block, context, PAGE, BLOCK)  # loaded before it is needed
        keys_at = block * BLOCK + tokens
        offsets = tokens_of(page, block, KV_HEADS * DIM, PAGE, BLOCK) + within
        key = tl.load(keys_ptr + offsets, (keys_at < context)[:, None], other=0.0)
        value = tl.load(values_ptr + offsets, (keys_at < context)[:, None], other=0.0)
        seen = keys_at[None, :] <= positions[:, None]
        scores = tl.where(seen, tl.dot(query, key.T, input_precision="ieee") * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        out = tl.dot(weights.to(value.dtype), value, out * shrink[:, None], input_precision="ieee")
        top = new_top
        page = next_page
    divisor = tl.where(total > 0, total, 1.0)
    return out / divisor[:, None], tl.where(total > 0, top + tl.log2(divisor), -1e30)


@triton.jit
def combine(  # type: ignore[no-untyped-def]
    parts_ptr,  # first part of a group's heads, [GROUP, DIM]; the next part is STRIDE * DIM further on
    weights_ptr,  # weights of the first part, [GROUP]; the next weights are STRIDE further on
    num_parts,
    out_ptr,  # [GROUP, DIM]
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
):
    """Sums the parts by weight. Reads bypass this multiprocessor's cache, since other programs wrote the parts."""
    PARTS: tl.constexpr = 64 // PADDED_GROUP if PADDED_GROUP < 32 else 2  # as many at a time as the registers hold
    heads = tl.arange(0, PADDED_GROUP)
    places = heads[:, None] * DIM + tl.arange(0, DIM)[None, :]
    top = tl.full([PADDED_GROUP], -1e30, tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    out = tl.zeros([PADDED_GROUP, DIM], tl.float32)
    for begin in range(0, num_parts, PARTS):
        parts = begin + tl.arange(0, PARTS)
        real = (parts < num_parts)[:, None] & (heads < GROUP)[None, :]
        weights = tl.load(weights_ptr + parts[:, None] * STRIDE + heads, real, other=-1e30, cache_modifier=".cg")
        values = tl.load(
            parts_ptr + parts[:, None, None] * (STRIDE * DIM) + places,
            real[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(weights, 0))
        shrink = tl.exp2(top - new_top)
        shares = tl.exp2(weights - new_top)
        total = total * shrink + tl.sum(shares, 0)
        out = out * shrink[:, None] + tl.sum(values * shares[:, :, None], 0)
        top = new_top
    tl.store(out_ptr + places, (out / total[:, None]).to(out_ptr.dtype.element_ty), (heads < GROUP)[:, None])


class Sizes(NamedTuple):
    """The sizes that our attention kernels are compiled for."""

    kv_heads: int
    group: int  # query heads per kv head
    padded_group: int  # `group`, rounded up to a power of two
    dim: int
    page: int
    fitting: int  # stages of a block's loads that fit into shared memory

    @classmethod
    def of(cls, query: Tensor, keys: Tensor) -> "Sizes":
        """
        query: [tokens, heads, head dim].
        keys: [pages, page size, kv heads, head dim].
        """
        num_heads, dim = query.shape[1:]
        page, kv_heads = keys.shape[1:3]
        assert page % BLOCK == 0 or BLOCK % page == 0, f"pages of {page} tokens do not fit steps of {BLOCK}"
        group = num_heads // kv_heads
        fitting = 1 + SHARED_MEMORY // PROGRAMS // (2 * BLOCK * dim * keys.element_size())
        return cls(kv_heads, group, triton.next_power_of_2(group), dim, page, fitting)

    def constants(self) -> dict[str, int]:
        """Returns the sizes, keyed by the kernels' parameter names."""
        return {
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "PADDED_GROUP": self.padded_group,
            "DIM": self.dim,
            "PAGE": self.page,
            "BLOCK": BLOCK,
        }
