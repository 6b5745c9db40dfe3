"""Which KV blocks and request-table rows an iteration accesses, and which change owner; for the race checker."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.executor import Step
from cbatch.kv import blocks_for
from cbatch.request_table import NEVER, Ints
from cbatch.runtime.batch import Fields
from cbatch.runtime.streams import Items

TABLE_ROW = "request-table row"

Packed = Callable[[], Fields[NDArray[Any]]]
"""Returns the packed inputs of an iteration."""


def block_kind(stage: int) -> str:
    """The kind of the `Items` of a pipeline stage's part of the KV cache."""
    return f"KV block of stage {stage}:" if stage else "KV block"


def blocks_read(packed: Packed, block_size: int, stage: int) -> Items:
    """The blocks that hold the contexts of an iteration, each once."""

    def numbers() -> Ints:
        batch = packed()
        held = blocks_for(batch.context_lens, block_size)  # [rows]
        columns = np.arange(batch.block_tables.shape[1])
        return np.unique(batch.block_tables[columns < held[:, None]]).astype(np.int64)

    return Items(block_kind(stage), numbers)


def blocks_written(packed: Packed, block_size: int, stage: int) -> Items:
    """The blocks that take the keys and values of an iteration's tokens, padding included, each once."""
    return Items(block_kind(stage), lambda: np.unique(packed().kv_indices // block_size).astype(np.int64))


def table_rows(step: Step) -> Items:
    """The request-table rows of a step's requests."""
    return Items(TABLE_ROW, lambda: step.rows)


class Owners:
    """The last known owner of each KV block and request-table row, as launched steps show it.

    A change of owner is a write by the host: no operation in flight may still use the item for the old owner. A request
    that was preempted comes back as a new owner.
    """

    def __init__(self, num_stages: int = 1) -> None:
        self._of_block = [np.zeros(0, np.int64)] * num_stages  # each stage has its part of a block
        self._of_row = np.zeros(0, np.int64)

    def changes(self, step: Step) -> tuple[Items, ...]:
        """The blocks and table rows that a step's requests hold and that had another owner."""
        blocks = (
            Items(block_kind(stage), partial(self._new_blocks, step, stage)) for stage in range(len(self._of_block))
        )
        return *blocks, Items(TABLE_ROW, partial(self._new_rows, step))

    def _new_blocks(self, step: Step, stage: int) -> Ints:
        pool, rows = step.pool, step.rows
        held = blocks_for(step.start + step.num_tokens, pool.block_size)  # [batch]
        width = int(held.max())
        holds = np.arange(width) < held[:, None]  # [batch, width]
        blocks = pool.tables[rows, :width][holds].astype(np.int64)
        owners = np.broadcast_to(_owner_numbers(step)[:, None], holds.shape)[holds]
        known = self._of_block[stage] = _grow(self._of_block[stage], pool.num_blocks)
        changed: Ints = blocks[known[blocks] != owners]
        known[blocks] = owners
        return changed

    def _new_rows(self, step: Step) -> Ints:
        ids = step.table.id[step.rows]
        self._of_row = _grow(self._of_row, step.table.num_rows)
        changed: Ints = step.rows[self._of_row[step.rows] != ids]
        self._of_row[step.rows] = ids
        return changed


def _owner_numbers(step: Step) -> Ints:
    """A number for each request of the batch, unique among requests and their preemptions; int64 [batch]."""
    preemptions = np.array([request.num_preemptions for request in step.requests], np.int64)
    numbers: Ints = step.table.id[step.rows] * (1 << 20) + preemptions
    return numbers


def _grow(owners: Ints, num_items: int) -> Ints:
    missing = num_items - len(owners)
    return np.pad(owners, (0, missing), constant_values=NEVER) if missing > 0 else owners
