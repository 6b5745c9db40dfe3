"""The rows of an iteration that compute several tokens, picked out of all rows.

A captured iteration has a row for every request of the largest batch, and nearly all of them are decodes or padding. A
kernel made for chunks starts programs for every row that it is given, empty or not, and 128 of them take longer than the
one chunk that is there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import threshold

from cbatch.runtime.batch import Bounds, Fields


class Rows(NamedTuple):
    """The rows that a kernel is to compute.

    starts: int32 [rows + 1]; first token of each; the last one belongs to no row.
    query_lens: int32 [rows]; tokens of each, 0 for a row to be left out.
    context_lens: int32 [rows].
    block_tables: int32 [rows, blocks].
    """

    starts: torch.Tensor
    query_lens: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor


def chunk_rows(batch: Fields[torch.Tensor], bounds: Bounds) -> Rows:
    """The chunks of an iteration, the longest first, then empty rows up to the bound. Reads nothing back from the device."""
    query_lens, rows = batch.query_starts.diff().topk(bounds.max_chunks)
    return Rows(
        torch.cat([batch.query_starts[rows], batch.query_starts[:1]]),
        threshold(query_lens, 1, 0),  # a decode is no chunk
        batch.context_lens[rows],
        batch.block_tables[rows],
    )
