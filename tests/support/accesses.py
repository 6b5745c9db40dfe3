"""The memory that each operation of an executor reads and writes, its KV blocks and request-table rows included."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from cbatch.executor import Step
from cbatch.kv import Copies, blocks_for
from cbatch.runtime.batch import Work, host_views
from cbatch.runtime.host_memory import HostBlocks
from cbatch.runtime.slots import Slot, StageSlot

TABLE_ROW = "request-table row"


class Items(NamedTuple):
    """Some of many numbered things: blocks of the KV cache, rows of the request table.

    kind: their name in messages; items of one kind are identified by number.
    """

    kind: str
    numbers: Sequence[int]


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
    """Returns the accesses of the operations that `StreamExecutor` enqueues: `partial`s of the methods of its slots.

    The last known owner of each KV block and request-table row is the one that launched steps show. A change of owner is a write
    by the host: no operation in flight may still use the item for the old owner. A request that was preempted comes back as
    a new owner.
    """

    def __init__(self) -> None:
        self.stages: dict[HostBlocks, int] = {}  # of host memory
        self._steps: dict[int, Step] = {}  # the latest, of each slot
        self._owner_of_block: dict[int, tuple[int, int]] = {}
        self._owner_of_row: dict[int, int] = {}

    def of(self, operation: Any) -> Accesses:
        if isinstance(operation, Operation):
            return Accesses(operation.reads, operation.writes)
        assert isinstance(operation, partial), f"{operation} is no operation of the executor"
        if isinstance(operation.args[0], StageSlot):
            return self._of_compute(*operation.args)
        if isinstance(operation.args[0], Iterator):
            return Accesses(())  # goes on with an iteration, whose accesses are noted at its begin, in the same stream
        part, name = operation.func.__self__, operation.func.__name__  # type: ignore[attr-defined]
        if name == "copy":
            return self._of_copies(self.stages[part], *operation.args)
        if name == "upload":
            return Accesses((part.host,), [rank.device for rank in part.ranks])
        assert name == "download", f"{name} is no operation of the executor"
        rows = Items(TABLE_ROW, self._steps[part.index].rows.tolist())  # in use until the tokens are on the host
        sources = part.sampled[:1] + (part.guesses[:1] if self._has_drafts else [])
        return Accesses(sources, (part.tokens, rows))

    def _of_copies(self, stage: int, copies: Copies) -> Accesses:
        kind, slots = block_kind(stage), f"slot in host memory of stage {stage}"
        (out, written), (back, read) = ([*zip(*pairs, strict=True)] or ((), ()) for pairs in copies)
        return Accesses((Items(kind, out), Items(slots, read)), (Items(kind, back), Items(slots, written)))

    def of_packing(self, slot: Slot, step: Step) -> Accesses:
        """KV blocks, in the part of each stage, and table rows that change owner count as written by the host."""
        self._steps[slot.index], self._has_drafts = step, slot.max_drafts > 0
        blocks, rows = self._new_owners(step)
        parts = [Items(block_kind(stage), blocks) for stage in range(len(slot.stages))]
        return Accesses((), (slot.host, *parts, Items(TABLE_ROW, rows)))

    def of_fetching(self, slot: Slot) -> Accesses:
        return Accesses((slot.tokens,))

    def _of_compute(self, stage: StageSlot, work: Work) -> Accesses:
        batch, kind = host_views(stage.host_array, work.shape), block_kind(stage.stage)
        size = self._steps[stage.index].pool.block_size
        held = zip(batch.block_tables.tolist(), batch.context_lens.tolist(), strict=True)
        read = {block for table, context in held for block in table[: blocks_for(context, size)]}
        written = set((batch.kv_indices // size).tolist())
        for table, last in zip(batch.block_tables.tolist(), batch.query_starts[1:] - 1, strict=True):
            behind, position = batch.behind[last].item(), batch.positions[last].item()
            written |= {*table[(position - behind) // size : position // size + 1]} if behind else set()
        arrived = [buffer for rank in stage.ranks for buffer in (rank.device, rank.arriving)]
        leaving = [rank.leaving for rank in stage.ranks]
        for rank in stage.ranks if self._has_drafts else ():
            leaving.append(rank.device)
            if stage.stage:
                arrived.append(rank.rejected)
            else:
                arrived.append(rank.arriving_guesses)
                leaving += (rank.guesses, rank.rejected)
            if rank.leaving_rejected is not None:
                leaving.append(rank.leaving_rejected)
        return Accesses((*arrived, Items(kind, [*read])), (*leaving, Items(kind, [*written])))

    def _new_owners(self, step: Step) -> tuple[list[int], list[int]]:
        """The blocks that a step writes or reserves and the table rows of its requests, if they had another owner."""
        blocks, rows = list[int](), list[int]()
        size = step.pool.block_size
        for request, row, start in zip(step.requests, step.rows.tolist(), step.start.tolist(), strict=True):
            owner = request.id, request.num_preemptions
            held = step.pool.tables[row, start // size : step.pool.held_by(row)].tolist()
            blocks += [block for block in held if self._owner_of_block.get(block) != owner]
            self._owner_of_block |= dict.fromkeys(held, owner)
            if self._owner_of_row.get(row) != request.id:
                rows.append(row)
                self._owner_of_row[row] = request.id
        return blocks, rows


def block_kind(stage: int) -> str:
    """The kind of the `Items` of a pipeline stage's part of the KV cache."""
    return f"KV block of stage {stage}:" if stage else "KV block"
