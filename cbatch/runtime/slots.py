"""I/O slots: the buffers of one iteration in flight, the operations on them, and the events between these.

`num_stages + 1` slots are used in turn: with one stage, iteration N + 1 is packed and copied in while N is computed. A
slot is free again when the host has waited for its `downloaded`. A slot has a `StageSlot` for each pipeline stage,
and that a `RankSlot` for each rank of the stage's tensor-parallel group, on the rank's device; those of one rank form a
ring, through which an iteration's tokens come back to the first stage:

    stage 0  tokens that iteration N - num_stages sampled --> hidden states --+
    stage 1  hidden states --> hidden states, or in the last stage sampled tokens, on the first stage's device
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.executor import Step
from cbatch.limits import Limits
from cbatch.runtime.batch import Shape, Work, host_views, pack
from cbatch.runtime.checks.ownership import Owners, blocks_read, blocks_written, table_rows
from cbatch.runtime.streams import Event, Operation, Streams

Devices = Sequence[Sequence[torch.device]]
"""Of each stage, that of each of its ranks."""


def make_slots(
    limits: Limits, block_size: int, devices: Devices, streams: Streams, hidden_size: int = 0
) -> list["Slot"]:
    """`num_stages + 1` slots, each for the largest iteration within the limits.

    hidden_size: width of the hidden states between stages.
    """
    largest = Shape.largest(limits, block_size)
    slots = [Slot(index, largest, devices, streams, hidden_size) for index in range(len(devices) + 1)]
    for slot in slots:
        slot.carry_from(slots[slot.index - len(devices)])
    return slots


class Slot:
    """The buffers of one iteration. Owner: the executor. Each has one writer and is read only behind an event:

        buffer         written by             read by                 which has waited for
        host           the host (`pack`)      each h2d                (enqueued after packing)
        sampled        the last compute       the first compute,      computed of the last stage
                                              d2h                     computed of the last stage
        tokens         d2h                    the host (`fetch`)      downloaded

    stages: the buffers of each stage.
    host: int32 [words]; the packed inputs (`batch.Fields`), in pinned memory where there is a GPU.
    sampled: int32 [rows] for each rank; the token sampled for each row, on the first stage's devices, the same on all.
    tokens: int32 [rows]; that of the first rank on the host.
    downloaded: recorded by d2h after its work for this iteration.
    download_started: recorded by d2h before it; only where copies are timed.
    in_use: from `launch` to the end of `wait`.
    """

    def __init__(self, index: int, largest: Shape, devices: Devices, streams: Streams, hidden_size: int) -> None:
        """
        Args:
            index: iteration N uses slot N modulo the number of slots.
            largest: the largest iteration that the slot must hold.
        """
        pinned = devices[0][0].type == "cuda"
        self.index = index
        self.in_use = False
        self.host = torch.zeros(largest.size, dtype=torch.int32, pin_memory=pinned)
        self.sampled = [torch.zeros(largest.num_rows, dtype=torch.int32, device=device) for device in devices[0]]
        self.tokens = torch.zeros(largest.num_rows, dtype=torch.int32, pin_memory=pinned)
        self.host_array = self.host.numpy()  # the same memory
        self.token_array = self.tokens.numpy()  # the same memory
        self.stages = [
            StageSlot(self, stage, largest, group, streams, hidden_size) for stage, group in enumerate(devices)
        ]
        self.download_started, self.downloaded = streams.d2h.event(), streams.d2h.event()
        for name in ("host", "tokens"):
            streams.name(getattr(self, name), f"slot {index}'s buffer '{name}'")
        for rank, sampled in enumerate(self.sampled):
            streams.name(sampled, f"slot {index}'s buffer 'sampled'{_of_rank(rank)}")

    def carry_from(self, source: "Slot") -> None:
        """Connect the stages; the first reads the tokens of `source`, the slot of iteration N - num_stages."""
        first, last = self.stages[0], self.stages[-1]
        for rank, arriving in zip(first.ranks, source.sampled, strict=True):
            rank.arriving = arriving
        for rank, leaving in zip(last.ranks, self.sampled, strict=True):
            rank.leaving = leaving
        if first is not last:  # a single stage's stream orders its own work
            first.awaited += (source.stages[-1].computed,)
        for before, stage in pairwise(self.stages):
            for rank, following in zip(before.ranks, stage.ranks, strict=True):
                rank.leaving = following.arriving
            stage.awaited += (before.computed,)

    def pack(self, step: Step, shape: Shape, owners: Owners) -> Operation[Work]:
        """Host: write the step's inputs. KV blocks and table rows that change owner count as written here."""

        def body() -> Work:
            packed = host_views(self.host_array, shape)
            pack(step, shape, packed)
            return Work.of(shape, packed)

        return Operation(body, writes=(self.host, *owners.changes(step)))

    def download(self, step: Step) -> Operation[None]:
        """D2H: copy the sampled tokens out."""
        num_rows = len(step.rows)

        def body() -> None:
            self.tokens[:num_rows].copy_(self.sampled[0][:num_rows], non_blocking=True)

        return Operation(body, reads=self.sampled[:1], writes=(self.tokens, table_rows(step)))

    def fetch(self, num_rows: int) -> Operation[NDArray[np.int32]]:
        """Host: copy the tokens out of the buffer; int32 [rows]."""
        return Operation(lambda: self.token_array[:num_rows].copy(), reads=(self.tokens,))


class RankSlot:
    """The buffers of one iteration on one rank of a stage.

        buffer         written by             read by                 which has waited for
        device         h2d                    compute                 uploaded
        arriving       the compute before     compute                 that one's computed

    The compute before is that of the stage before, or of the last stage in iteration N - num_stages.

    device: int32 [words]; the packed inputs.
    arriving: hidden states of the stage before, float32 [tokens, hidden]; in the first stage the tokens that iteration
        N - num_stages sampled, int32 [rows].
    leaving: the next stage's `arriving`; in the last stage the slot's `sampled`.
    """

    arriving: torch.Tensor
    leaving: torch.Tensor

    def __init__(self, stage: int, largest: Shape, device: torch.device, hidden_size: int) -> None:
        self.device = torch.zeros(largest.size, dtype=torch.int32, device=device)
        if stage:  # the first stage reads tokens, from `Slot.carry_from`
            self.arriving = torch.zeros((largest.num_tokens, hidden_size), device=device)


class StageSlot:
    """One iteration in one stage: the buffers of each rank, and the stage's events.

    index: of the slot. stage: number of the stage.
    uploaded, computed: recorded by h2d and compute after their work for this iteration.
    awaited: events for which compute waits.
    started: recorded by compute before its work, to time it; no stream waits for it.
    upload_started: the same for h2d; recorded only where copies are timed.
    """

    def __init__(
        self,
        slot: Slot,
        stage: int,
        largest: Shape,
        devices: Sequence[torch.device],
        streams: Streams,
        hidden_size: int,
    ) -> None:
        self.index, self.stage = slot.index, stage
        self.host, self.host_array = slot.host, slot.host_array
        self.ranks = [RankSlot(stage, largest, device, hidden_size) for device in devices]
        self.upload_started, self.uploaded = streams.h2d[stage].event(), streams.h2d[stage].event()
        self.started, self.computed = streams.compute[stage].event(), streams.compute[stage].event()
        self.awaited: tuple[Event, ...] = (self.uploaded,)
        where = f" in stage {stage}" if stage else ""
        for rank, buffers in enumerate(self.ranks):
            streams.name(buffers.device, f"slot {slot.index}'s buffer 'device'{where}{_of_rank(rank)}")
            if stage:
                streams.name(buffers.arriving, f"slot {slot.index}'s buffer 'arriving'{where}{_of_rank(rank)}")

    def upload(self, work: Work) -> Operation[None]:
        """H2D: copy the packed inputs in."""
        num_words, copies = work.shape.size, [rank.device for rank in self.ranks]

        def body() -> None:
            for device in copies:
                device[:num_words].copy_(self.host[:num_words], non_blocking=True)

        return Operation(body, reads=(self.host,), writes=copies)

    def compute(self, iteration: Callable[["StageSlot", Work], None], work: Work, block_size: int) -> Operation[None]:
        """Compute: from the inputs and what arrives, to what leaves."""
        packed = partial(host_views, self.host_array, work.shape)
        arrived = (buffer for rank in self.ranks for buffer in (rank.device, rank.arriving))
        return Operation(
            partial(iteration, self, work),
            reads=(*arrived, blocks_read(packed, block_size, self.stage)),
            writes=(*(rank.leaving for rank in self.ranks), blocks_written(packed, block_size, self.stage)),
        )


def _of_rank(rank: int) -> str:
    return f" of rank {rank}" if rank else ""
