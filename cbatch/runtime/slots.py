"""I/O slots: the buffers of one iteration in flight, the operations on them, and the events between these.

`num_stages + 1` slots are used in turn: with one stage, iteration N + 1 is packed and copied in while N is computed. A
slot is free again when the host has waited for its `downloaded`.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.executor import Step
from cbatch.limits import Limits
from cbatch.runtime.batch import Shape, Work, host_views, pack
from cbatch.runtime.checks.ownership import Owners, blocks_read, blocks_written, table_rows
from cbatch.runtime.streams import Operation, Streams


def make_slots(limits: Limits, block_size: int, device: torch.device, streams: Streams) -> list["Slot"]:
    """`num_stages + 1` slots, each for the largest iteration within the limits."""
    largest = Shape.largest(limits, block_size)
    return [Slot(index, largest, device, streams) for index in range(limits.num_stages + 1)]


class Slot:
    """The buffers of one iteration. Owner: the executor. Each has one writer and is read only behind an event:

        buffer         written by             read by                 which has waited for
        host           the host (`pack`)      h2d                     (enqueued after packing)
        device         h2d                    compute                 uploaded
        sampled        compute                compute (carry-over),   (the same stream)
                                              d2h                     computed
        tokens         d2h                    the host (`fetch`)      downloaded

    host, device: int32 [words]; the packed inputs (`batch.Fields`), the first in pinned memory where there is a GPU.
    sampled, tokens: int32 [rows]; the token sampled for each row, on the device and on the host.
    uploaded, computed, downloaded: recorded by h2d, compute and d2h after their work for this iteration.
    started: recorded by compute before its work, to time it; no stream waits for it.
    upload_started, download_started: the same for h2d and d2h; recorded only where copies are timed.
    in_use: from `launch` to the end of `wait`.
    """

    def __init__(self, index: int, largest: Shape, device: torch.device, streams: Streams) -> None:
        """
        Args:
            index: iteration N uses slot N modulo the number of slots.
            largest: the largest iteration that the slot must hold.
        """
        pinned = device.type == "cuda"
        self.index = index
        self.in_use = False
        self.host = torch.zeros(largest.size, dtype=torch.int32, pin_memory=pinned)
        self.device = torch.zeros(largest.size, dtype=torch.int32, device=device)
        self.sampled = torch.zeros(largest.num_rows, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(largest.num_rows, dtype=torch.int32, pin_memory=pinned)
        self.host_array = self.host.numpy()  # the same memory
        self.token_array = self.tokens.numpy()  # the same memory
        self.upload_started, self.uploaded = streams.h2d.event(), streams.h2d.event()
        self.started, self.computed = streams.compute.event(), streams.compute.event()
        self.download_started, self.downloaded = streams.d2h.event(), streams.d2h.event()
        for name in ("host", "device", "sampled", "tokens"):
            streams.name(getattr(self, name), f"slot {index}'s buffer '{name}'")

    def pack(self, step: Step, shape: Shape, owners: Owners) -> Operation[Work]:
        """Host: write the step's inputs. KV blocks and table rows that change owner count as written here."""

        def body() -> Work:
            packed = host_views(self.host_array, shape)
            pack(step, shape, packed)
            return Work.of(shape, packed)

        return Operation(body, writes=(self.host, *owners.changes(step)))

    def upload(self, work: Work) -> Operation[None]:
        """H2D: copy the packed inputs in."""
        num_words = work.shape.size

        def body() -> None:
            self.device[:num_words].copy_(self.host[:num_words], non_blocking=True)

        return Operation(body, reads=(self.host,), writes=(self.device,))

    def compute(
        self, iteration: Callable[["Slot", torch.Tensor, Work], None], source: "Slot", work: Work, block_size: int
    ) -> Operation[None]:
        """Compute: from the inputs, and the tokens that `source` sampled, to the tokens that this slot samples."""
        packed = partial(host_views, self.host_array, work.shape)
        return Operation(
            partial(iteration, self, source.sampled, work),
            reads=(self.device, source.sampled, blocks_read(packed, block_size)),
            writes=(self.sampled, blocks_written(packed, block_size)),
        )

    def download(self, step: Step) -> Operation[None]:
        """D2H: copy the sampled tokens out."""
        num_rows = len(step.rows)

        def body() -> None:
            self.tokens[:num_rows].copy_(self.sampled[:num_rows], non_blocking=True)

        return Operation(body, reads=(self.sampled,), writes=(self.tokens, table_rows(step)))

    def fetch(self, num_rows: int) -> Operation[NDArray[np.int32]]:
        """Host: copy the tokens out of the buffer; int32 [rows]."""
        return Operation(lambda: self.token_array[:num_rows].copy(), reads=(self.tokens,))
