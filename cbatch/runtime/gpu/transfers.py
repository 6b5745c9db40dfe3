"""Copies KV blocks from the caches of one executor to those of another, on a GPU or between two.

One kernel per GPU loads scattered blocks of all layers and stores them in the other GPU's memory, without a buffer in between. Its programs are
few enough to leave most of the GPU to the iteration that it computes meanwhile. It reads the numbers of the blocks from the host's memory.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from cbatch.runtime.attention import PagedCache
from cbatch.runtime.gpu.devices import CudaClock, CudaEvent, connect

BLOCK = 4096  # words of 8 bytes that a program copies at once

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


def launcher(there: PagedCache, here: PagedCache, programs: int = PROGRAMS) -> Callable[[int, int, int], None]:
    """Compiles the kernel and returns a function that enqueues copies on a stream of the GPU of `there`.

    It takes the address of the block numbers there, followed by those here (int32, in pinned or the GPU's memory), the number of blocks, and
    the stream's handle. It uses addresses instead of tensors, and the compiled kernel instead of Triton's lookup: copies are rare, and code
    that has not run for a while is slow.
    """
    source, target = (cache.both.view(torch.int64).flatten(0, 1).flatten(2) for cache in (there, here))
    texts = [cache.texts.view(torch.int64) for cache in (there, here)]
    device, strides = source.device, (source.stride(0), target.stride(0))
    sizes = len(source), source.shape[2], texts[0].shape[1], BLOCK
    pairs = torch.empty(2, dtype=torch.int32, pin_memory=True)
    with torch.cuda.device(device):
        kernel = _copy_kernel[(programs,)](source, target, *texts, *strides, pairs, 0, *sizes, num_warps=8)
    run, addresses = kernel[(programs, 1, 1)], [part.data_ptr() for part in (source, target, *texts)]

    def launch(address: int, num_blocks: int, stream: int) -> None:
        with torch.cuda.device(device):
            run(*addresses, *strides, address, num_blocks, *sizes, stream=stream)

    return launch


class BlockCopier:
    """The copies from one executor to another, on a stream of its own of each of the sender's GPUs. Any thread begins one, any waits for it.

    The sender's blocks are leased and their iterations have ended; the receiver's are reserved, and used by no iteration before. So no copy
    waits for another stream. The receiver's later iterations do, or a thread waits for the copies before the receiver hears of them.
    """

    def __init__(
        self,
        sender: Sequence[Sequence[PagedCache]],
        receiver: Sequence[Sequence[PagedCache]],
        follow: Callable[[CudaEvent], object] = lambda event: None,
    ) -> None:
        """Copies a dummy block once, which compiles the kernel.

        sender, receiver: caches by stage and rank, of equal shapes but for their blocks. follow: `StreamExecutor.follow` of the receiver.
        """
        ends = list(zip(chain(*sender), chain(*receiver), strict=True))
        for there, here in ends:
            connect(there.keys.device, here.keys.device, "backend.pools with roles")
        self._launchers = [launcher(*end) for end in ends]
        self._block_bytes = sum(there.both[:, :, 0].nbytes for there, _ in ends)
        devices, self.follow = [there.keys.device for there, _ in ends], follow
        clocks = {device: CudaClock(device) for device in devices}
        self._clocks = [clocks[device] for device in devices]
        self._streams = [torch.cuda.Stream(device, priority=-1) for device in devices]
        self._most = 2 * min(caches[0][0].size.num_blocks for caches in (sender, receiver))
        self.spare: list[_Buffer] = []
        self([[cache.size.num_blocks] for cache in (sender[0][0], receiver[0][0])]).wait()

    def __call__(self, pairs: Any) -> "BlockCopy":
        """Begins to copy blocks. pairs: int32 [2, blocks], there and here.

        Calls of PyTorch are few here, as each may wait for Python's other threads.
        """
        number = len(pairs[0])
        try:
            buffer = self.spare.pop()
        except IndexError:
            pinned = torch.empty(self._most, dtype=torch.int32, pin_memory=True)
            buffer = _Buffer(pinned.numpy(), pinned.data_ptr(), CudaEvent(self._clocks))
        numbers, address, event = buffer
        numbers[:number], numbers[number : 2 * number] = pairs
        for launch, stream, part in zip(self._launchers, self._streams, event.events, strict=True):
            launch(address, number, stream.cuda_stream)
            part.record(stream)
        return BlockCopy(self, buffer, self._block_bytes * number)


class _Buffer(NamedTuple):
    """What a copy needs until it has ended. numbers: int32 [most], pinned. address: theirs."""

    numbers: NDArray[np.int32]
    address: int
    event: CudaEvent


class BlockCopy(NamedTuple):
    """See `cbatch.cluster.transfers.Copy`."""

    copies: BlockCopier
    buffer: _Buffer
    num_bytes: int

    def wait(self) -> tuple[int, float]:
        event = self.buffer.event
        event.synchronize()
        late = max(perf_counter() - event.time(), 0.0)
        self.copies.spare.append(self.buffer)  # the kernels have read the numbers
        return self.num_bytes, late

    def precede(self) -> None:
        self.copies.follow(self.buffer.event)
