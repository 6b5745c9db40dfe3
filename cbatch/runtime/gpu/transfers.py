"""Copies KV blocks from the caches of one executor to those of another, on a GPU or between two.

One kernel per GPU loads scattered blocks of all layers and stores them in the other GPU's memory, without a buffer in between. Its programs are
few enough to leave most of the GPU to the iteration that it computes meanwhile. It reads the numbers of the blocks from the host's memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from cbatch.runtime.attention import PagedCache
from cbatch.runtime.gpu.devices import connect

BLOCK = 4096
"""Words of 8 bytes that a program copies at once."""

PROGRAMS = 64
"""93% of a plain copy's rate between two H200s. On one GPU, where a plain copy has all multiprocessors, 128 reach 88%, 64 reach 76%."""


@triton.jit(do_not_specialize=["num_blocks"])
def _copy_kernel(  # type: ignore[no-untyped-def]
    source_ptr,  # [LAYERS, blocks there + 1, WORDS]
    target_ptr,  # [LAYERS, blocks here + 1, WORDS]
    source_texts_ptr,  # [blocks there + 1, TEXT_WORDS]
    target_texts_ptr,  # [blocks here + 1, TEXT_WORDS]
    source_stride,
    target_stride,
    pairs_ptr,  # [2, num_blocks], in the host's memory
    num_blocks,
    LAYERS: tl.constexpr,
    WORDS: tl.constexpr,
    TEXT_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    parts: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK  # of a block in a layer
    for block in range(num_blocks):
        old = tl.load(pairs_ptr + block).to(tl.int64)
        new = tl.load(pairs_ptr + num_blocks + block).to(tl.int64)
        for item in range(tl.program_id(0), LAYERS * parts, tl.num_programs(0)):
            layer, words = (item // parts).to(tl.int64), item % parts * BLOCK + tl.arange(0, BLOCK)
            inside = words < WORDS
            values = tl.load(source_ptr + layer * source_stride + old * WORDS + words, inside)
            tl.store(target_ptr + layer * target_stride + new * WORDS + words, values, inside)
        if block % tl.num_programs(0) == tl.program_id(0):
            place = tl.arange(0, BLOCK)
            text = tl.load(source_texts_ptr + old * TEXT_WORDS + place, place < TEXT_WORDS)
            tl.store(target_texts_ptr + new * TEXT_WORDS + place, text, place < TEXT_WORDS)


def launcher(there: PagedCache, here: PagedCache, programs: int = PROGRAMS) -> Callable[[torch.Tensor, int], object]:
    """Returns a function that enqueues copies on the current stream, of the GPU of `there`.

    It takes the numbers of blocks there, then those here, int32 in pinned or the GPU's memory, and how many blocks they are.
    """
    source, target = (cache.both.view(torch.int64).flatten(0, 1).flatten(2) for cache in (there, here))
    texts = [cache.texts.view(torch.int64) for cache in (there, here)]
    strides = source.stride(0), target.stride(0)
    sizes = {"LAYERS": len(source), "WORDS": source.shape[2], "TEXT_WORDS": texts[0].shape[1], "BLOCK": BLOCK}
    return partial(_copy_kernel[(programs,)], source, target, *texts, *strides, **sizes, num_warps=8)


class BlockCopies:
    """The copies from one executor to another, on a stream of its own of each of the sender's GPUs. Any thread begins one, any waits for it.

    The sender's blocks are leased and their iterations have ended; the receiver's are reserved, and used by no iteration. So no stream waits for
    another: a thread waits for the copies, before either executor hears of them.
    """

    def __init__(self, sender: Sequence[Sequence[PagedCache]], receiver: Sequence[Sequence[PagedCache]]) -> None:
        """sender, receiver: caches by stage and rank, of equal shapes but for their blocks. Copies a dummy block once, which compiles the kernel."""
        ends = list(zip(chain(*sender), chain(*receiver), strict=True))
        for there, here in ends:
            connect(there.keys.device, here.keys.device, "backend.pools with roles")
        self._launchers = [launcher(*end) for end in ends]
        self._block_bytes = sum(there.both[:, :, 0].nbytes for there, _ in ends)
        self._streams = [torch.cuda.Stream(there.keys.device, priority=-1) for there, _ in ends]
        self._most = 2 * min(caches[0][0].size.num_blocks for caches in (sender, receiver))
        self._spare: list[torch.Tensor] = []  # int32 [most], pinned
        self([[cache.size.num_blocks] for cache in (sender[0][0], receiver[0][0])])()

    def __call__(self, pairs: Any) -> Callable[[], int]:
        """Begins to copy blocks; returns a function that waits for the copies, and returns the bytes. pairs: int32 [2, blocks], there and here.

        Calls of PyTorch are few here, as each may wait for Python's other threads.
        """
        number = len(pairs[0])
        try:
            numbers = self._spare.pop()
        except IndexError:
            numbers = torch.empty(self._most, dtype=torch.int32, pin_memory=True)
        numbers.numpy()[: 2 * number] = np.concatenate(pairs)
        events = [torch.cuda.Event() for _ in self._streams]
        for launch, stream, event in zip(self._launchers, self._streams, events, strict=True):
            with torch.cuda.stream(stream):
                launch(numbers, number)
            event.record(stream)
        return partial(self._wait, events, numbers, self._block_bytes * number)

    def _wait(self, events: Sequence[torch.cuda.Event], numbers: torch.Tensor, num_bytes: int) -> int:
        for event in events:
            event.synchronize()
        self._spare.append(numbers)  # which the kernels have read
        return num_bytes
