"""I/O slots: the buffers of one iteration in flight, and the events that say how far it has come.

Two slots are used in turn, so that iteration N + 1 is packed and copied in while N is computed and N - 1 copied out. A
slot is free again when the host has waited for its `downloaded`.
"""

from __future__ import annotations

import numpy as np
import torch

from cbatch.runtime.batch import Shape
from cbatch.runtime.streams import Streams


class Slot:
    """The buffers of one iteration. Owner: the executor. Each has one writer and is read only behind an event:

        buffer         written by             read by                 which has waited for
        host           the host (`pack`)      h2d                     (enqueued after packing)
        device         h2d                    compute                 uploaded
        sampled        compute                compute (carry-over),   (the same stream)
                                              d2h                     computed
        tokens         d2h                    the host                downloaded

    host, device: int32 [words]; the packed inputs (`batch.Fields`), the first in pinned memory where there is a GPU.
    sampled, tokens: int32 [rows]; the token sampled for each row, on the device and on the host.
    uploaded, computed, downloaded: recorded by h2d, compute and d2h after their work for this iteration.
    started: recorded by compute before its work; nobody waits for it, it only tells the time.
    upload_started, download_started: the same of h2d and d2h; recorded only where the copies are timed.
    """

    def __init__(
        self, index: int, largest: Shape, device: torch.device, streams: Streams, *, poison: bool = False
    ) -> None:
        """
        Args:
            index: 0 or 1; iteration N uses slot N modulo 2.
            largest: the largest iteration that the slot must hold.
            poison: start with -1 in the token buffers, so that reading what was never written shows.
        """
        pinned = device.type == "cuda"
        fill = -1 if poison else 0
        self.index = index
        self.host = torch.zeros(largest.size, dtype=torch.int32, pin_memory=pinned)
        self.device = torch.zeros(largest.size, dtype=torch.int32, device=device)
        self.sampled = torch.full((largest.num_rows,), fill, dtype=torch.int32, device=device)
        self.tokens = torch.full((largest.num_rows,), fill, dtype=torch.int32, pin_memory=pinned)
        self.host_array = self.host.numpy()  # the same memory
        self.token_array = self.tokens.numpy()  # the same memory
        self.upload_started = streams.h2d.event()
        self.uploaded = streams.h2d.event()
        self.started = streams.compute.event()
        self.computed = streams.compute.event()
        self.download_started = streams.d2h.event()
        self.downloaded = streams.d2h.event()
        for name in ("host", "device", "sampled", "tokens"):
            streams.name(getattr(self, name), f"slot {index}'s buffer '{name}'")
        self.in_use = False  # from `launch` to the end of `wait`; the host's own mark

    def upload(self, num_words: int) -> None:
        """An operation of h2d: copy the packed inputs in."""
        self.device[:num_words].copy_(self.host[:num_words], non_blocking=True)

    def download(self, num_rows: int) -> None:
        """An operation of d2h: copy the sampled tokens out."""
        self.tokens[:num_rows].copy_(self.sampled[:num_rows], non_blocking=True)

    def result(self, num_rows: int) -> np.typing.NDArray[np.int32]:
        """The tokens, copied out of the buffer; for the host, after `downloaded`. int32 [rows]."""
        return self.token_array[:num_rows].copy()
