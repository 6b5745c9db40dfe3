"""The memory that each operation of an executor reads and writes, its KV blocks and request-table rows included."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.executor import Step
from cbatch.kv import blocks_for
from cbatch.request import NEVER, Ints
from cbatch.runtime.batch import Fields, Work, host_views
from cbatch.runtime.slots import Slot, StageSlot

TABLE_ROW = "request-table row"


class Items(NamedTuple):
    """Some of many numbered things: blocks of the KV cache, rows of the request table.

    kind: their name in messages; items of one kind are identified by number. numbers: int64 [items].
    """

    kind: str
    numbers: Ints


class Accesses(NamedTuple):
    """What an operation accesses: tensors, each standing for its whole storage, and `Items`."""

    reads: Sequence[Any] = ()
    writes: Sequence[Any] = ()


class Operation(NamedTuple):
    """Work for a stream that names its accesses itself."""

    body: Callable[[], object]
    reads: Sequence[Any] = ()
    writes: Sequence[Any] = ()

    def __call__(self) -> None:
        self.body()


class Declarations:
    """Returns the accesses of the operations that `StreamExecutor` enqueues: `partial`s of the methods of its slots."""

    def __init__(self) -> None:
        self._steps: dict[int, Step] = {}  # the latest, of each slot
        self._owners: Owners | None = None

    def of(self, operation: Any) -> Accesses:
        if isinstance(operation, Operation):
            return Accesses(operation.reads, operation.writes)
        assert isinstance(operation, partial), f"{operation} is no operation of the executor"
        if isinstance(operation.args[0], StageSlot):
            return self._of_compute(*operation.args)
        part, name = operation.func.__self__, operation.func.__name__  # type: ignore[attr-defined]
        if name == "upload":
            return Accesses((part.host,), [rank.device for rank in part.ranks])
        assert name == "download", f"{name} is no operation of the executor"
        rows = Items(TABLE_ROW, self._steps[part.index].rows)  # they are in use until the tokens are on the host
        return Accesses(part.sampled[:1], (part.tokens, rows))

    def of_packing(self, slot: Slot, step: Step) -> Accesses:
        """KV blocks and table rows that change owner count as written by the host."""
        self._steps[slot.index] = step
        self._owners = self._owners or Owners(len(slot.stages))
        return Accesses((), (slot.host, *self._owners.changes(step)))

    def of_fetching(self, slot: Slot) -> Accesses:
        return Accesses((slot.tokens,))

    def _of_compute(self, stage: StageSlot, work: Work) -> Accesses:
        batch = host_views(stage.host_array, work.shape)
        size, kind = self._steps[stage.index].pool.block_size, block_kind(stage.stage)
        arrived = (buffer for rank in stage.ranks for buffer in (rank.device, rank.arriving))
        return Accesses(
            (*arrived, Items(kind, _blocks_read(batch, size))),
            (
                *(rank.leaving for rank in stage.ranks),
                Items(kind, np.unique(batch.kv_indices // size).astype(np.int64)),
            ),
        )


def block_kind(stage: int) -> str:
    """The kind of the `Items` of a pipeline stage's part of the KV cache."""
    return f"KV block of stage {stage}:" if stage else "KV block"


def _blocks_read(batch: Fields[NDArray[Any]], block_size: int) -> Ints:
    """The blocks that hold the contexts of an iteration, each once."""
    held = blocks_for(batch.context_lens, block_size)  # [rows]
    columns = np.arange(batch.block_tables.shape[1])
    return np.unique(batch.block_tables[columns < held[:, None]]).astype(np.int64)


class Owners:
    """The last known owner of each KV block and request-table row, as launched steps show it.

    A change of owner is a write by the host: no operation in flight may still use the item for the old owner. A request
    that was preempted comes back as a new owner.
    """

    def __init__(self, num_stages: int) -> None:
        self._of_block = [np.zeros(0, np.int64)] * num_stages  # each stage has its part of a block
        self._of_row = np.zeros(0, np.int64)

    def changes(self, step: Step) -> list[Items]:
        """The blocks and table rows that a step's requests hold and that had another owner."""
        blocks = [Items(block_kind(stage), self._new_blocks(step, stage)) for stage in range(len(self._of_block))]
        return [*blocks, Items(TABLE_ROW, self._new_rows(step))]

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
