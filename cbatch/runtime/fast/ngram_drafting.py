"""Drafts of n-grams in one kernel, where PyTorch's operations are several dozen, each of a few microseconds."""

import torch
import triton
import triton.language as tl

from cbatch.drafts import NgramDrafter
from cbatch.limits import Limits
from cbatch.runtime.batch import Fields, Work
from cbatch.runtime.carry import Drafting
from cbatch.runtime.slots import RankSlot

BLOCK = 1024  # places of a text that a program compares in one step

FIELDS = "token_ids_ptr carry_ptr behind_ptr positions_ptr kv_indices_ptr query_starts_ptr context_lens_ptr drafts_ptr tables_ptr"


@triton.jit(do_not_specialize=["num_rows", "table_width"], do_not_specialize_on_alignment=FIELDS.split())
def _begin_kernel(  # type: ignore[no-untyped-def]
    token_ids_ptr,  # [tokens], as are the next four; written, except carry and behind
    carry_ptr,
    behind_ptr,
    positions_ptr,
    kv_indices_ptr,
    query_starts_ptr,  # [num_rows + 1]
    context_lens_ptr,  # [num_rows], written
    drafts_ptr,  # [num_rows]
    tables_ptr,  # [num_rows, table_width]
    arriving_ptr,  # [1 + rows + MOST], as are both guesses
    arriving_guesses_ptr,
    guesses_ptr,  # written
    rejected_ptr,  # [tokens], written
    texts_ptr,  # [blocks * PAGE], written
    num_rows,
    table_width,
    MOST: tl.constexpr,
    LANES: tl.constexpr,  # a power of two above MOST
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    if row == num_rows - 1:
        tl.store(guesses_ptr + num_rows + lanes, tl.full([LANES], -1, tl.int32), lanes <= MOST)
    if tl.load(drafts_ptr + row) == 0:  # the first row of a request; its program also writes the rows of its drafts
        rows = row + lanes
        ours = tl.load(drafts_ptr + rows, rows < num_rows, other=0) == lanes
        found = tl.full([LANES], -1, tl.int32)
        end = tl.load(query_starts_ptr + row + 1)
        if end > tl.load(query_starts_ptr + row):
            tokens = end - 1 + lanes
            table_ptr = tables_ptr + row * table_width
            carry = tl.load(carry_ptr + end - 1)
            sampled = tl.load(arriving_ptr + carry + lanes, lanes < MOST, other=0)
            equal = sampled == tl.load(arriving_guesses_ptr + carry + lanes, lanes < MOST, other=-1)
            accepted = tl.min(tl.where(equal, LANES, lanes))
            rejected = tl.load(behind_ptr + end - 1) - accepted
            newest = tl.load(token_ids_ptr + end - 1) + tl.load(arriving_ptr + carry + accepted)
            contexts = tl.load(context_lens_ptr + rows, ours, other=0) - rejected
            length = tl.sum(tl.where(lanes == 0, contexts, 0))
            positions = tl.load(positions_ptr + tokens, ours, other=0) - rejected
            places = tl.load(table_ptr + positions // PAGE, ours, other=0) * PAGE + positions % PAGE
            tl.debug_barrier()  # all warps have read what is written from here on
            tl.store(rejected_ptr + tokens, tl.full([LANES], 0, tl.int32) + rejected, ours)
            tl.store(context_lens_ptr + rows, contexts, ours)
            tl.store(positions_ptr + tokens, positions, ours)
            tl.store(kv_indices_ptr + tokens, places, ours)
            if tl.max(tl.where(ours, lanes, 0)) > 0:
                width = table_width * PAGE
                best = length * 0
                for begin in range(0, length, BLOCK):
                    place = begin + tl.arange(0, BLOCK)
                    alike = place < length
                    merit = -place
                    for back in tl.static_range(1, MAX_N + 1):
                        last = (
                            newest if back == 1 else _token(texts_ptr, table_ptr, length - back, length >= back, PAGE)
                        )
                        alike = alike & (place >= back)
                        alike = alike & (_token(texts_ptr, table_ptr, place - back, alike, PAGE) == last)
                        merit += tl.where(alike, width, 0)
                    best = tl.maximum(best, tl.max(merit))
                # of the most equal tokens the first place
                place = tl.cdiv(best, width) * width - best + lanes - 1
                known = ours & (lanes > 0) & (best > (MIN_N - 1) * width) & (place < length)
                draft = _token(texts_ptr, table_ptr, place, known, PAGE)
                found = tl.where(known, tl.where(place == length - 1, newest, draft), found)
            inputs = tl.where(lanes == 0, newest, tl.maximum(found, 0))
            tl.store(token_ids_ptr + tokens, inputs, ours)
            tl.store(texts_ptr + places, inputs, ours)
        tl.store(guesses_ptr + rows, found, ours)


@triton.jit
def _token(texts_ptr, table_ptr, place, known, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the tokens at places of a request's text."""
    page = tl.load(table_ptr + place // PAGE, known, other=0)
    return tl.load(texts_ptr + page * PAGE + place % PAGE, known, other=-1)


class NgramDrafting(Drafting):
    """Makes the drafts of an `NgramDrafter`; the inputs replace `token_ids`. A text is read as far as it is known."""

    def __init__(self, drafter: NgramDrafter, texts: torch.Tensor, limits: Limits) -> None:
        self._drafter, self._texts, self._limits = drafter, texts, limits

    def begin(self, batch: Fields[torch.Tensor], rank: RankSlot, work: Work) -> torch.Tensor:
        drafter, (num_rows, table_width) = self._drafter, batch.block_tables.shape
        rank.rejected[: len(batch.carry)].zero_()
        if len(batch.positions) > num_rows:  # tokens of prompts
            self._texts.view(-1).index_copy_(0, batch.kv_indices.long(), batch.token_ids)
        _begin_kernel[(num_rows,)](
            batch.token_ids,
            batch.carry,
            batch.behind,
            batch.positions,
            batch.kv_indices,
            batch.query_starts,
            batch.context_lens,
            batch.drafts,
            batch.block_tables,
            rank.arriving,
            rank.arriving_guesses,
            rank.guesses,
            rank.rejected,
            self._texts,
            num_rows,
            table_width,
            MOST=self._limits.max_drafts,
            LANES=triton.next_power_of_2(self._limits.max_drafts + 1),
            MIN_N=drafter.min_n,
            MAX_N=drafter.max_n,
            PAGE=self._texts.shape[1],
            BLOCK=BLOCK,
            num_warps=8,
        )
        return batch.token_ids
