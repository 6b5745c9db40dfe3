"""Selects the chunks of an iteration from all its rows.

A captured iteration has a row for every request of the largest batch, and nearly all rows are decodes or padding. A kernel made
for chunks starts programs even for empty rows: 128 empty rows take longer than one real chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold

from cbatch.runtime.batch import Extents, Fields


class Rows(NamedTuple):
    """The rows that a kernel computes.

    starts: int32 [rows + 1]; first token of each row; the last entry belongs to no row.
    query_lens: int32 [rows]; tokens of each row, 0 for a row to skip.
    context_lens: int32 [rows].
    block_tables: int32 [rows, blocks].
    """

    starts: Tensor
    query_lens: Tensor
    context_lens: Tensor
    block_tables: Tensor


def chunk_rows(batch: Fields[Tensor], bounds: Extents) -> Rows:
    """Returns the chunks, longest first, then empty rows up to the bound. The host reads nothing from the device."""
    query_lens, rows = batch.query_starts.diff().topk(bounds.max_chunks)
    return Rows(
        torch.cat([batch.query_starts[rows], batch.query_starts[:1]]),
        threshold(query_lens, 1, 0),  # decodes are skipped
        batch.context_lens[rows],
        batch.block_tables[rows],
    )
