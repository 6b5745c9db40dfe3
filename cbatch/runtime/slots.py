"""I/O slots: the buffers of one iteration in flight, the operations on the buffers, and the events that order the operations.

`num_stages + 1` slots are used in turn: with one stage, iteration N + 1 is packed and copied in while N is computed. A slot is
free again once the host has waited for the slot's `downloaded`. A `Slot` has one `StageSlot` per pipeline stage, which has one
`RankSlot` per rank of the stage, on the rank's device. The `RankSlot`s of a rank form a ring:

    stage 0  tokens that iteration N - num_stages sampled --> hidden states --+
    stage 1  hidden states --> hidden states, or in the last stage sampled tokens, on the first stage's device
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.drafts import NO_DRAFT
from cbatch.executor import Step
from cbatch.limits import Limits
from cbatch.runtime.batch import Shape, Work, host_views, pack
from cbatch.runtime.streams import Event, Streams

Devices = Sequence[Sequence[torch.device]]  # the device of each rank, by stage


def make_slots(
    limits: Limits, block_size: int, devices: Devices, streams: Streams, hidden_size: int = 0
) -> list["Slot"]:
    """Returns `num_stages + 1` slots for the largest iteration. hidden_size: width of the hidden states between stages."""
    largest = Shape.largest(limits, block_size)
    slots = [
        Slot(index, largest, devices, streams, hidden_size, limits.max_drafts) for index in range(len(devices) + 1)
    ]
    for slot in slots:
        slot.carry_from(slots[slot.index - len(devices)])
    return slots


class Slot:
    """The buffers of one iteration. Owner: the executor. Each buffer has one writer and is read only after an event:

        buffer         written by             read by                 which has waited for
        host           the host (`pack`)      each h2d                (enqueued after packing)
        sampled        the last compute       the first compute,      computed of the last stage
                                              d2h                     computed of the last stage
        tokens         d2h                    the host (`fetch`)      downloaded

    host: int32 [words]; the packed inputs (`batch.Fields`), in pinned memory where there is a GPU.
    sampled: int32 [1 + rows] per rank, on the first stage's devices, with equal contents; a 0 for inputs that are not carried
        over, then the token sampled for each row.
    guesses: of the size of `sampled`, written by the first compute; see `carry.count_accepted`. Both end with room for a request's drafts.
    tokens: int32 [2, rows]; the sampled tokens on the host, and with drafts the guesses.
    download_started, downloaded: recorded by d2h before (only if copies are timed) and after its work.
    in_use: True from `launch` to the end of `wait`.
    """

    def __init__(
        self, index: int, largest: Shape, devices: Devices, streams: Streams, hidden_size: int, max_drafts: int
    ) -> None:
        """index: iteration N uses the slot with index N modulo the number of slots. largest: shape of the largest iteration."""
        pinned = devices[0][0].type == "cuda"
        self.index = index
        self.in_use = False
        self.host = torch.zeros(largest.size, dtype=torch.int32, pin_memory=pinned)
        size = 1 + largest.num_rows + max_drafts
        self.sampled = [torch.zeros(size, dtype=torch.int32, device=device) for device in devices[0]]
        self.guesses = [torch.full_like(sampled, NO_DRAFT) for sampled in self.sampled]
        self.tokens = torch.zeros((2, largest.num_rows), dtype=torch.int32, pin_memory=pinned)
        self.max_drafts = max_drafts
        self.host_array = self.host.numpy()  # the same memory
        self.token_array = self.tokens.numpy()  # the same memory
        self.stages = [
            StageSlot(self, stage, largest, group, streams, hidden_size) for stage, group in enumerate(devices)
        ]
        self.download_started, self.downloaded = streams.d2h.event(), streams.d2h.event()

    def carry_from(self, source: "Slot") -> None:
        """Connects the stages in a ring. The first stage reads the tokens of `source`, the slot of iteration N - num_stages."""
        first, last = self.stages[0], self.stages[-1]
        for rank, *carried in zip(first.ranks, source.sampled, source.guesses, self.guesses, strict=True):
            rank.arriving, rank.arriving_guesses, rank.guesses = carried
        for rank, leaving in zip(last.ranks, self.sampled, strict=True):
            rank.leaving = leaving[1:]
        if first is not last:  # one stream already orders the work of a single stage
            first.awaited += (source.stages[-1].computed,)
        for before, stage in pairwise(self.stages):
            for rank, following in zip(before.ranks, stage.ranks, strict=True):
                rank.leaving, rank.leaving_rejected = following.arriving, following.rejected
            stage.awaited += (before.computed,)

    def pack(self, step: Step, shape: Shape) -> Work:
        """Writes the step's inputs to the host buffer, and returns the work that they describe."""
        packed = host_views(self.host_array, shape)
        pack(step, shape, packed)
        return Work.of(shape, packed)

    def download(self, num_rows: int) -> None:
        """Copies the sampled tokens, and with drafts the guesses, to the host. Runs on d2h."""
        for values, source in zip(self.tokens, (self.sampled, self.guesses)[: 1 + (self.max_drafts > 0)], strict=False):
            values[:num_rows].copy_(source[0][1 : 1 + num_rows], non_blocking=True)

    def fetch(self, num_rows: int) -> NDArray[np.int32]:
        """Returns a copy of the downloaded tokens and guesses, int32 [2, rows]."""
        return self.token_array[:, :num_rows].copy()


class RankSlot:
    """The buffers of one iteration on one rank of a stage.

        buffer         written by             read by                 which has waited for
        device         h2d                    compute                 uploaded
        arriving       the source's compute   compute                 computed of the source

    The source is the preceding stage; for the first stage, the last stage in iteration N - num_stages.

    device: int32 [words]; the packed inputs.
    arriving: hidden states of the preceding stage, float32 [tokens, hidden]; in the first stage a 0, then the tokens that
        iteration N - num_stages sampled, int32 [1 + rows].
    leaving: the next stage's `arriving`; in the last stage the tokens of the slot's `sampled`, int32 [rows].
    arriving_guesses, guesses: in the first stage those of the source's slot, and of this slot.
    rejected: see `carry.step_back`; int32 [tokens], written with `arriving`. leaving_rejected: the next stage's; None in the last stage.
    """

    arriving: torch.Tensor
    leaving: torch.Tensor
    arriving_guesses: torch.Tensor
    guesses: torch.Tensor
    leaving_rejected: torch.Tensor | None = None

    def __init__(self, stage: int, largest: Shape, device: torch.device, hidden_size: int) -> None:
        self.device = torch.zeros(largest.size, dtype=torch.int32, device=device)
        self.rejected = torch.zeros(largest.num_tokens, dtype=torch.int32, device=device)
        if stage:  # the first stage reads tokens, from `Slot.carry_from`
            self.arriving = torch.zeros((largest.num_tokens, hidden_size), device=device)


class StageSlot:
    """One iteration in one stage: the buffers of each rank, and the stage's events.

    index: index of the slot. stage: index of the stage.
    upload_started, uploaded: recorded by h2d before (only if copies are timed) and after its work.
    started, computed: recorded by compute before and after its work.
    awaited: events that compute waits for.
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

    def upload(self, work: Work) -> None:
        """Copies the packed inputs to each rank. Runs on h2d."""
        num_words = work.shape.size
        for rank in self.ranks:
            rank.device[:num_words].copy_(self.host[:num_words], non_blocking=True)
