"""The host's part of a stage's KV cache: memory for evicted blocks, and the stream that copies blocks out and back.

    host      launch N ------------------------------> launch N+1
    blocks        out N, back N --copied-->                out N+1, back N+1
    compute   N-1                 (waits) N                            (waits) N+1

A block that is copied was free, so no iteration in flight uses it: the copies wait for no stream, and overlap the iterations before. The
iteration that takes these blocks waits for `copied`. Copies of successive iterations follow each other, so a slot is read before it is
overwritten.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf

import torch
from torch import Tensor

from cbatch.errors import CapacityError
from cbatch.executor import BlockCopies, Step
from cbatch.kv import Copies, KVSize
from cbatch.model import ModelSpec
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.streams import Event, Stream

PIECE = 1 << 30  # bytes of a piece of host memory: PyTorch rounds pinned memory up to a power of two
AT_ONCE = 1 << 26  # bytes of blocks that are gathered on the device before they are copied

Pairs = Sequence[tuple[int, int]]


class HostBlocks:
    """The memory of one rank's slots: [2, layers, block size, kv heads, head dim] each, keys before values; pinned beside a GPU.

    The tokens of the blocks stay on the device.
    """

    def __init__(self, cache: PagedCache) -> None:
        size = cache.size
        self._parts = [part.transpose(0, 1) for part in (cache.keys, cache.values)]  # [blocks + 1, layers, ...]
        shape, pinned = (2, *self._parts[0].shape[1:]), cache.keys.is_cuda
        slot_bytes = cache.keys.element_size() * shape[0] * self._parts[0][0].numel()
        self._per_piece = max(PIECE // slot_bytes, 1)
        self._pieces = [
            torch.empty((min(self._per_piece, left), *shape), dtype=cache.keys.dtype, pin_memory=pinned)
            for left in range(size.num_host_blocks, 0, -self._per_piece)
        ]
        most = max(min(AT_ONCE // slot_bytes, size.num_host_blocks), 1)
        self._gathered = torch.empty((most, *shape), dtype=cache.keys.dtype, device=cache.keys.device)
        self._texts, self._kept_texts = cache.texts, cache.texts.new_zeros(size.num_host_blocks, size.block_size)

    @torch.inference_mode()
    def copy(self, copies: Copies) -> None:
        for blocks, numbers, slots, gathered in self._in_parts(copies.out):
            self._kept_texts.index_copy_(0, numbers, self._texts.index_select(0, blocks))
            for place, part in enumerate(self._parts):
                gathered[:, place] = part.index_select(0, blocks)
            for slot, block in zip(slots, gathered, strict=True):
                slot.copy_(block, non_blocking=True)
        for blocks, numbers, slots, gathered in self._in_parts(copies.back):
            self._texts.index_copy_(0, blocks, self._kept_texts.index_select(0, numbers))
            for slot, block in zip(slots, gathered, strict=True):
                block.copy_(slot, non_blocking=True)
            for place, part in enumerate(self._parts):
                part.index_copy_(0, blocks, gathered[:, place])

    def _in_parts(self, pairs: Pairs) -> Iterator[tuple[Tensor, Tensor, Sequence[Tensor], Tensor]]:
        """Yields the numbers of as many blocks as are copied at once and of their slots, the slots, and memory on the device for the content."""
        most, device = len(self._gathered), self._gathered.device
        for first in range(0, len(pairs), most):
            blocks, slots = zip(*pairs[first : first + most], strict=True)
            numbers = torch.tensor((blocks, slots), pin_memory=device.type == "cuda").to(device, non_blocking=True)
            yield *numbers, [self._slot(slot) for slot in slots], self._gathered[: len(slots)]

    def _slot(self, slot: int) -> Tensor:
        piece: Tensor = self._pieces[slot // self._per_piece]
        return piece[slot % self._per_piece]


def machine_memory() -> float:
    """Returns the bytes of this machine's memory; infinity on systems that do not say."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else inf


def check_host_memory(specs: Sequence[ModelSpec], kv: KVSize, num_replicas: int = 1) -> None:
    """Raises CapacityError if the memory for evicted blocks exceeds this machine's. specs: of the model and any draft model."""
    needed = num_replicas * kv.num_host_blocks * kv.block_size * sum(spec.kv_bytes_per_token for spec in specs)
    if needed > (memory := machine_memory()):
        problem = f"kv.host_tokens needs {needed / 1e9:.1f} GB of host memory, this machine has {memory / 1e9:.1f} GB"
        raise CapacityError(f"{problem}; lower kv.host_tokens")


class StageCopies:
    """The copies of one stage, on a stream of its own. Owner: the executor."""

    def __init__(self, caches: Sequence[PagedCache], stream: Stream, num_in_flight: int) -> None:
        """caches: of each rank. num_in_flight: iterations that may have copies that the host has not waited for."""
        self.stream, self._ranks = stream, [HostBlocks(cache) for cache in caches]
        self._events: list[tuple[Event, Event]] = [(stream.event(), stream.event()) for _ in range(num_in_flight)]

    def launch(self, step: Step, copies: Copies) -> Event:
        """Enqueues the copies before a step. Returns the event that the step's computation waits for."""
        started, copied = self._events[step.index % len(self._events)]
        self.stream.record(started)
        for rank in self._ranks:
            self.stream.run(partial(rank.copy, copies))
        self.stream.record(copied)
        return copied

    def result(self, step: Step, copies: Copies, origin: float, could_begin: float) -> BlockCopies:
        """Returns the copies before a step that has ended. could_begin: when it could have begun without copies."""
        started, ended = (event.time() - origin for event in self._events[step.index % len(self._events)])
        return BlockCopies(step.index, len(copies.out), len(copies.back), started, ended, max(ended - could_begin, 0.0))


def stage_copies(
    stages: Sequence[Sequence[PagedCache]], stream_of: Callable[[int], Stream], num_in_flight: int
) -> list[StageCopies]:
    """Returns the copies of each stage; empty without host memory for the cache. stages: caches by stage and rank."""
    if not stages[0][0].size.num_host_blocks:
        return []
    return [StageCopies(caches, stream_of(stage), num_in_flight) for stage, caches in enumerate(stages)]
