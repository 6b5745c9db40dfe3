"""Copies KV blocks from one executor's caches to another's."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any

import torch

from cbatch.runtime.attention import PagedCache
from cbatch.runtime.streams import Event, Reached, ThreadEvent


@torch.inference_mode()
def copy_blocks(sender: Sequence[Sequence[PagedCache]], receiver: Sequence[Sequence[PagedCache]], pairs: Any) -> int:
    """Copies blocks, layer by layer; returns the bytes. On a CPU; `gpu.transfers` has the copies between GPUs.

    sender, receiver: caches by stage and rank, of the same sizes. pairs: int32 [2, blocks], each block's number there and here.
    """
    num_bytes = 0
    for stages in zip(sender, receiver, strict=True):
        for there, here in zip(*stages, strict=True):
            source, target = (torch.as_tensor(blocks).long() for blocks in pairs)
            here.texts.index_copy_(0, target, there.texts.index_select(0, source))
            for old, new in zip(there.both.flatten(0, 1), here.both.flatten(0, 1), strict=True):  # [blocks + 1, ...]
                sent = old.index_select(0, source)
                new.index_copy_(0, target, sent)
                num_bytes += sent.nbytes
    return num_bytes


class HostCopy:
    """A copy by the thread that waits for it. See `cbatch.cluster.transfers.Copy`."""

    def __init__(self, copy: Callable[[], int], follow: Callable[[Event], object]) -> None:
        """copy: returns the bytes. follow: `StreamExecutor.follow` of the receiver."""
        self._copy, self._follow, self._reached = copy, follow, Future[Reached]()

    def wait(self) -> tuple[int, float]:
        num_bytes = self._copy()  # if it fails, the run ends
        self._reached.set_result(Reached(perf_counter(), None))
        return num_bytes, 0.0

    def precede(self) -> None:
        self._follow(ThreadEvent(self._reached))
