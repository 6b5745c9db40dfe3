"""The small operations between a decoder layer's matrix products, each in one pass over memory.

Inputs named `parts` are [splits, tokens, width]: partial sums of a product whose inputs were split
(`small_batch_gemm`), or a plain product as the only part. If `dependent`, each kernel lets its successor start early and
waits for its predecessor ("programmatic dependent launch"), which requires compute capability 9.0.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cbatch.runtime.attention import PLACE_BITS
from cbatch.runtime.gpu.exchange import COUNTS, Awaited, Meeting, add_parts, wait_for_others


@triton.jit(do_not_specialize=["num_tokens", "num_signals"], do_not_specialize_on_alignment=COUNTS)
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,  # [SPLITS, tokens, WIDTH]
    source_ptr,  # [tokens, WIDTH]
    residual_ptr,  # [tokens, WIDTH], written
    weight_ptr,  # [WIDTH]
    out_ptr,  # [tokens, WIDTH]
    inbox_ptr,  # [RANKS - 1, box]
    arrived_ptr,  # [RANKS]
    base_ptr,  # [1]
    next_ptr,  # [1]
    num_tokens,
    epsilon,
    box,
    num_signals,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    MOVES: tl.constexpr,  # whether source and residual differ
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if DEPENDENT:
        gdc_launch_dependents()
    weight = tl.load(weight_ptr + columns, inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    if RANKS > 1:
        wait_for_others(arrived_ptr, base_ptr, next_ptr, num_signals, token == 0, RANK, RANKS)
    places = token * WIDTH + columns
    hidden = tl.load(source_ptr + places, inside, other=0.0).to(tl.float32)
    num_values = num_tokens.to(tl.int64) * WIDTH
    hidden = add_parts(hidden, parts_ptr, inbox_ptr, num_values, box, places, inside, SPLITS, RANK, RANKS)
    if SPLITS > 0 or MOVES:
        tl.store(residual_ptr + places, hidden.to(residual_ptr.dtype.element_ty), inside)
    scale = tl.rsqrt(tl.sum(hidden * hidden) / WIDTH + epsilon)
    tl.store(out_ptr + places, (hidden * scale * weight).to(out_ptr.dtype.element_ty), inside)


def add_norm(
    parts: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    dependent: bool,
    source: torch.Tensor | None = None,
    meeting: Meeting | None = None,
) -> torch.Tensor:
    """Adds a layer's output to the residual stream, in place, and normalises the sum (RMSNorm).

    Args:
        parts: [splits, tokens, hidden]; None if there is nothing to add.
        residual: [tokens, hidden].
        source: [tokens, hidden]; residual stream from another GPU; `residual` is then only written.
        meeting: meeting at which the ranks exchange `parts`; the kernel waits for the other ranks' parts and adds them.

    Returns:
        [tokens, hidden], the input of the next product.
    """
    num_tokens, width = residual.shape
    out = torch.empty_like(residual)
    awaited = Awaited.at(meeting, residual)
    _add_norm_kernel[(num_tokens,)](
        residual if parts is None else parts,
        residual if source is None else source,
        residual,
        weight,
        out,
        *awaited.tensors,
        num_tokens,
        epsilon,
        awaited.box,
        awaited.num_signals,
        WIDTH=width,
        SPLITS=0 if parts is None else len(parts),
        MOVES=source is not None,
        BLOCK=triton.next_power_of_2(width),
        DEPENDENT=dependent,
        RANK=awaited.rank.index,
        RANKS=awaited.rank.size,
        num_warps=16 if num_tokens <= 128 else 8,  # few programs are latency-bound
        launch_pdl=dependent and source is None,  # a stage's first kernel has no predecessor
    )
    return out


@triton.jit(
    do_not_specialize=["num_tokens", "layer"],
    do_not_specialize_on_alignment=["positions_ptr", "kv_indices_ptr", "sent_ptr"],
)
def _rotate_and_store_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,  # [SPLITS, tokens, (HEADS + 2 * KV_HEADS) * 2 * HALF]
    rotations_ptr,  # [positions, 2, HALF]
    positions_ptr,  # [tokens]
    kv_indices_ptr,  # [tokens]
    sent_ptr,  # [tokens]
    addresses_ptr,  # [receivers + 1, 3]
    query_weight_ptr,  # [2 * HALF]
    key_weight_ptr,  # [2 * HALF]
    bias_ptr,  # [(HEADS + 2 * KV_HEADS) * 2 * HALF]
    query_ptr,  # [tokens, HEADS, 2 * HALF]
    keys_ptr,  # [blocks * block size, KV_HEADS, 2 * HALF]
    values_ptr,
    num_tokens,
    layer,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SPLITS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PLACE_BITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    DIM: tl.constexpr = 2 * HALF
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * BLOCK_HEADS
    heads = first_head + tl.arange(0, BLOCK_HEADS)[:, None]
    half = tl.arange(0, HALF)[None, :]
    sent = tl.load(sent_ptr + token)  # no kernel writes it
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    low = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
    high = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
    if BIAS:
        low += tl.load(bias_ptr + heads * DIM + half).to(tl.float32)
        high += tl.load(bias_ptr + heads * DIM + HALF + half).to(tl.float32)
    for split in tl.static_range(SPLITS):
        source = parts_ptr + (split * num_tokens + token) * WIDTH + heads * DIM + half
        low += tl.load(source).to(tl.float32)
        high += tl.load(source + HALF).to(tl.float32)
    if first_head < HEADS + KV_HEADS:  # a query or a key
        if NORM:
            weight_ptr = query_weight_ptr if first_head < HEADS else key_weight_ptr
            scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + epsilon)[:, None]
            low *= scale * tl.load(weight_ptr + half).to(tl.float32)
            high *= scale * tl.load(weight_ptr + HALF + half).to(tl.float32)
        rotation = rotations_ptr + tl.load(positions_ptr + token).to(tl.int64) * DIM + half
        cosine, sine = tl.load(rotation), tl.load(rotation + HALF)
        low, high = low * cosine - high * sine, high * cosine + low * sine
    if first_head < HEADS:
        target = query_ptr + (token * HEADS + heads) * DIM + half
    else:
        index = tl.load(kv_indices_ptr + token).to(tl.int64)
        if first_head < HEADS + KV_HEADS:
            target = keys_ptr + (index * KV_HEADS + heads - HEADS) * DIM + half
        else:
            target = values_ptr + (index * KV_HEADS + heads - HEADS - KV_HEADS) * DIM + half
    tl.store(target, low.to(query_ptr.dtype.element_ty))
    tl.store(target + HALF, high.to(query_ptr.dtype.element_ty))
    if (first_head >= HEADS) & (sent > 0):
        receiver = addresses_ptr + (sent >> PLACE_BITS) * 3
        is_value = (first_head >= HEADS + KV_HEADS).to(tl.int32)
        cache = tl.multiple_of(tl.load(receiver + is_value).to(keys_ptr.dtype), 16)
        row = (sent & ((1 << PLACE_BITS) - 1)).to(tl.int64) * KV_HEADS + heads - HEADS - is_value * KV_HEADS
        place = cache + layer * tl.multiple_of(tl.load(receiver + 2), 16) + row * DIM + half
        tl.store(place, low.to(query_ptr.dtype.element_ty))
        tl.store(place + HALF, high.to(query_ptr.dtype.element_ty))


def rotate_and_store(
    parts: torch.Tensor,
    rotations: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_heads: int,
    *,
    sent: torch.Tensor,
    addresses: torch.Tensor,
    layer: int,
    bias: torch.Tensor | None = None,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 0.0,
    dependent: bool,
) -> torch.Tensor:
    """Sums a QKV product, rotates queries and keys by position, and stores keys and values in the cache.

    Args:
        parts: [splits, tokens, (heads + 2 kv heads) * head dim].
        rotations: float32 [positions, 2, head dim / 2]; cosines and sines.
        positions, kv_indices: int32 [tokens].
        keys, values: [blocks, block size, kv heads, head dim]; written.
        sent, addresses, layer: where keys and values are written in other caches; see `PagedCache`. layer: its place among the cache's.
        bias: [(heads + 2 kv heads) * head dim].
        norms: weights of the RMSNorm of each query and key head, [head dim] each.

    Returns:
        The queries, [tokens, heads, head dim].
    """
    splits, num_tokens, _ = parts.shape
    *_, kv_heads, dim = keys.shape
    query = torch.empty((num_tokens, num_heads, dim), dtype=keys.dtype, device=parts.device)
    block_heads = max(size for size in (8, 4, 2, 1) if num_heads % size == 0 and kv_heads % size == 0)
    query_weight, key_weight = norms or (parts, parts)
    _rotate_and_store_kernel[(num_tokens, (num_heads + 2 * kv_heads) // block_heads)](
        parts,
        rotations,
        positions,
        kv_indices,
        sent,
        addresses,
        query_weight,
        key_weight,
        parts if bias is None else bias,
        query,
        keys,
        values,
        num_tokens,
        layer,
        epsilon,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        SPLITS=splits,
        NORM=norms is not None,
        BIAS=bias is not None,
        BLOCK_HEADS=block_heads,
        PLACE_BITS=PLACE_BITS,
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )
    return query


@triton.jit
def _gate_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,  # [tokens, 2 * WIDTH]
    out_ptr,  # [tokens, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    gates = tl.load(parts_ptr + token * 2 * WIDTH + columns, inside, other=0.0).to(tl.float32)
    ups = tl.load(parts_ptr + token * 2 * WIDTH + WIDTH + columns, inside, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + token * WIDTH + columns, (gates / (1 + tl.exp(-gates)) * ups).to(out_ptr.dtype.element_ty), inside
    )


def gate(gates_and_ups: torch.Tensor, *, dependent: bool) -> torch.Tensor:
    """Returns the activation of a gated feed-forward layer (SwiGLU, Shazeer 2020): SiLU(gate) * up.

    gates_and_ups: [tokens, 2 * width], the gates first.

    Returns:
        [tokens, width].
    """
    num_tokens, width = gates_and_ups.shape[0], gates_and_ups.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gates_and_ups.dtype, device=gates_and_ups.device)
    block = 2048
    _gate_kernel[(num_tokens, triton.cdiv(width, block))](
        gates_and_ups, out, WIDTH=width, BLOCK=block, DEPENDENT=dependent, num_warps=8, launch_pdl=dependent
    )
    return out
