"""Copies KV blocks from the caches of one executor to those of another, on a GPU or between two.

One kernel per GPU loads scattered blocks of all layers and stores them in the other GPU's memory, without a buffer in between. Its programs are
few enough to leave most of the GPU to the iteration that it computes meanwhile.
"""

from collections.abc import Sequence
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
    pairs_ptr,  # [2, num_blocks]
    num_blocks,
    source_stride,
    target_stride,
    LAYERS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    parts: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK  # of a block in a layer
    for item in range(tl.program_id(0), LAYERS * num_blocks * parts, tl.num_programs(0)):
        layer, block = (item // parts // num_blocks).to(tl.int64), item // parts % num_blocks
        words = item % parts * BLOCK + tl.arange(0, BLOCK)
        inside = words < WORDS
        old = tl.load(pairs_ptr + block).to(tl.int64)
        new = tl.load(pairs_ptr + num_blocks + block).to(tl.int64)
        values = tl.load(source_ptr + layer * source_stride + old * WORDS + words, inside)
        tl.store(target_ptr + layer * target_stride + new * WORDS + words, values, inside)


def enqueue_copy(there: PagedCache, here: PagedCache, pairs: torch.Tensor, programs: int = PROGRAMS) -> int:
    """Enqueues the copies on the current stream, of the GPU of `there`; returns the bytes of keys and values. pairs: int32 [2, blocks], there and here."""
    num_bytes = 0
    texts = there.texts[None], here.texts[None]
    for old, new in (texts, (there.keys, here.keys), (there.values, here.values)):
        source, target = (part.view(torch.int64).flatten(2) for part in (old, new))  # [layers, blocks + 1, words]
        layers, words, num_blocks = len(source), source.shape[2], pairs.shape[1]
        strides = source.stride(0), target.stride(0)
        _copy_kernel[(programs,)](
            source, target, pairs, num_blocks, *strides, LAYERS=layers, WORDS=words, BLOCK=BLOCK, num_warps=8
        )
        num_bytes += 8 * layers * words * num_blocks
    return num_bytes - pairs.shape[1] * there.texts[0].nbytes


class BlockCopies:
    """The copies from one executor to another, on a stream of its own of each of the sender's GPUs. Owner: one thread.

    The sender's blocks are leased and their iterations have ended; the receiver's are reserved, and used by no iteration. So no stream waits for
    another: the thread waits for the copies, before either executor hears of them.
    """

    def __init__(self, sender: Sequence[Sequence[PagedCache]], receiver: Sequence[Sequence[PagedCache]]) -> None:
        """sender, receiver: caches by stage and rank, of equal shapes but for their blocks. Copies a dummy block once, which compiles the kernel."""
        self._ends = list(zip(chain(*sender), chain(*receiver), strict=True))
        for there, here in self._ends:
            connect(there.keys.device, here.keys.device, "backend.pools with roles")
        self._streams = [torch.cuda.Stream(there.keys.device, priority=-1) for there, _ in self._ends]
        dummies = [[cache.size.num_blocks] for cache in (sender[0][0], receiver[0][0])]
        self(dummies)

    @torch.inference_mode()
    def __call__(self, pairs: Any) -> int:
        """Copies blocks and waits for the copies; returns the bytes. pairs: int32 [2, blocks], each block's number there and here."""
        numbers = torch.from_numpy(np.stack(pairs).astype(np.int32))
        num_bytes, ends = 0, []
        for (there, here), stream in zip(self._ends, self._streams, strict=True):
            with torch.cuda.stream(stream):
                num_bytes += enqueue_copy(there, here, numbers.to(there.keys.device))
                ends.append(torch.cuda.Event())
                ends[-1].record(stream)
        for event in ends:
            event.synchronize()
        return num_bytes
