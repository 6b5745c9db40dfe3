"""The likeliest token of each row, found by many programs per row; PyTorch's own search uses one per row."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHUNK = 8192
"""Tokens of the vocabulary that one program searches."""

BLOCK = 2048


@triton.jit
def _search_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [rows, VOCABULARY]
    values_ptr,  # [rows, chunks]
    tokens_ptr,  # [rows, chunks]
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    places = tl.full([BLOCK], VOCABULARY - 1, tl.int32)
    for begin in range(chunk * CHUNK, (chunk + 1) * CHUNK, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        values = tl.load(logits_ptr + row * VOCABULARY + columns, columns < VOCABULARY, other=-float("inf")).to(
            tl.float32
        )
        places = tl.where(values > best, columns, places)
        best = tl.maximum(values, best)
    top = tl.max(best)
    place = row * tl.num_programs(1) + chunk
    tl.store(values_ptr + place, top)
    tl.store(tokens_ptr + place, tl.min(tl.where(best == top, places, VOCABULARY - 1)))


@triton.jit
def _choose_kernel(  # type: ignore[no-untyped-def]
    values_ptr,  # [rows, CHUNKS]
    tokens_ptr,  # [rows, CHUNKS]
    out_ptr,  # [rows]
    CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,  # the next power of two
    VOCABULARY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0)
    chunks = tl.arange(0, PADDED_CHUNKS)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(values_ptr + row * CHUNKS + chunks, chunks < CHUNKS, other=-float("inf"))
    tokens = tl.load(tokens_ptr + row * CHUNKS + chunks, chunks < CHUNKS, other=VOCABULARY - 1)
    tl.store(out_ptr + row, tl.min(tl.where(values == tl.max(values), tokens, VOCABULARY - 1)))


def argmax(logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Same as `sampling.greedy`, on a GPU.

    Args:
        logits: [rows, vocabulary], contiguous. NaN is ignored.
        out: int32 [rows]; receives the tokens, and is returned; may be on another GPU that this one can access.
    """
    num_rows, vocabulary = logits.shape
    dependent = torch.cuda.get_device_capability(logits.device) >= (9, 0)
    chunks = triton.cdiv(vocabulary, CHUNK)
    values = torch.empty((num_rows, chunks), device=logits.device)
    tokens = torch.empty((num_rows, chunks), dtype=torch.int32, device=logits.device)
    _search_kernel[(num_rows, chunks)](
        logits,
        values,
        tokens,
        VOCABULARY=vocabulary,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )
    _choose_kernel[(num_rows,)](
        values,
        tokens,
        out,
        CHUNKS=chunks,
        PADDED_CHUNKS=triton.next_power_of_2(chunks),
        VOCABULARY=vocabulary,
        DEPENDENT=dependent,
        num_warps=1,
        launch_pdl=dependent,
    )
    return out
