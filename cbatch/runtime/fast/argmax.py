"""Finds the likeliest token of each row with many programs per row, where PyTorch's argmax uses one."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cbatch.model import Rank
from cbatch.runtime.gpu.exchange import (
    COUNTS,
    Awaited,
    Exchange,
    Meeting,
    signal_others,
    store_for_others,
    wait_for_others,
)

CHUNK = 8192  # tokens of the vocabulary that one program searches

BLOCK = 2048


@triton.jit
def _search_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [rows, VOCABULARY]
    values_ptr,  # [rows, RANKS * chunks]
    tokens_ptr,  # [rows, RANKS * chunks]
    values_addresses_ptr,  # [RANKS]
    tokens_addresses_ptr,  # [RANKS]
    counters_ptr,  # [RANKS]
    first_token,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
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
    token = tl.min(tl.where(best == top, places, VOCABULARY - 1)) + first_token
    place = (row * RANKS + RANK) * tl.num_programs(1) + chunk
    tl.store(values_ptr + place, top)
    tl.store(tokens_ptr + place, token)
    if RANKS > 1:
        store_for_others(values_addresses_ptr, place, top, True, RANK, RANKS)
        store_for_others(tokens_addresses_ptr, place, token, True, RANK, RANKS)
        signal_others(counters_ptr, RANK, RANKS)


@triton.jit(do_not_specialize=["num_signals"], do_not_specialize_on_alignment=COUNTS)
def _choose_kernel(  # type: ignore[no-untyped-def]
    values_ptr,  # [rows, CHUNKS]
    tokens_ptr,  # [rows, CHUNKS]
    out_ptr,  # [rows]
    arrived_ptr,  # [RANKS]
    base_ptr,  # [1]
    next_ptr,  # [1]
    num_signals,
    CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,  # the next power of two
    VOCABULARY: tl.constexpr,
    DEPENDENT: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    row = tl.program_id(0)
    chunks = tl.arange(0, PADDED_CHUNKS)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if RANKS > 1:
        wait_for_others(arrived_ptr, base_ptr, next_ptr, num_signals, row == 0, RANK, RANKS)
    values = tl.load(values_ptr + row * CHUNKS + chunks, chunks < CHUNKS, other=-float("inf"))
    tokens = tl.load(tokens_ptr + row * CHUNKS + chunks, chunks < CHUNKS, other=VOCABULARY - 1)
    tl.store(out_ptr + row, tl.min(tl.where(values == tl.max(values), tokens, VOCABULARY - 1)))


def argmax(logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Computes the same as `sampling.greedy`, on a GPU.

    Args:
        logits: [rows, vocabulary], contiguous. NaN is ignored.
        out: int32 [rows]; receives the tokens and is returned; may be on another GPU that this GPU can access.
    """
    num_rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    values = torch.empty((num_rows, chunks), device=logits.device)
    tokens = torch.empty((num_rows, chunks), dtype=torch.int32, device=logits.device)
    _search(logits, values, tokens, chunks)
    _choose(values, tokens, out, vocabulary)
    return out


def search_share(logits: torch.Tensor, exchange: Exchange, meeting: Meeting) -> None:
    """Stores the likeliest token of each chunk of a rank's vocabulary share in all ranks' tables. logits: [rows, share], contiguous."""
    meeting.num_signals = len(logits) * exchange.num_chunks
    _search(logits, *exchange.table, exchange.num_chunks, exchange, meeting)


def choose_share(out: torch.Tensor, exchange: Exchange, meeting: Meeting) -> None:
    """Writes the likeliest token over the chunks of all ranks. out: int32 [rows], as in `argmax`."""
    _choose(*exchange.table, out, exchange.vocabulary, meeting)


def _search(
    logits: torch.Tensor,
    values: torch.Tensor,
    tokens: torch.Tensor,
    chunks: int,
    exchange: Exchange | None = None,
    meeting: Meeting | None = None,
) -> None:
    num_rows, vocabulary = logits.shape
    dependent = torch.cuda.get_device_capability(logits.device) >= (9, 0)
    rank = exchange.rank if exchange else Rank()
    _search_kernel[(num_rows, chunks)](
        logits,
        values,
        tokens,
        *(exchange.table_addresses if exchange else (values, values)),
        meeting.counters if meeting else values,
        exchange.first_token if exchange else 0,
        VOCABULARY=vocabulary,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        DEPENDENT=dependent,
        RANK=rank.index,
        RANKS=rank.size,
        num_warps=4,
        launch_pdl=dependent,
    )


def _choose(
    values: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor, vocabulary: int, meeting: Meeting | None = None
) -> None:
    dependent = torch.cuda.get_device_capability(values.device) >= (9, 0)
    chunks, awaited = values.shape[1], Awaited.at(meeting, values)
    _choose_kernel[(len(out),)](
        values,
        tokens,
        out,
        *awaited.tensors[1:],
        awaited.num_signals,
        CHUNKS=chunks,
        PADDED_CHUNKS=triton.next_power_of_2(chunks),
        VOCABULARY=vocabulary,
        DEPENDENT=dependent,
        RANK=awaited.rank.index,
        RANKS=awaited.rank.size,
        num_warps=1,
        launch_pdl=dependent,
    )
