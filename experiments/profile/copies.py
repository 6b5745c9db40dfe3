"""Times copies of KV blocks: to pinned host memory and back, as `runtime.host_memory` makes them, and to another GPU's cache, as replicas do."""

from itertools import pairwise
from random import Random
from statistics import median
from time import perf_counter, sleep

import numpy as np
import torch

from cbatch import KVSize, ModelSpec
from cbatch.kv import Copies
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.host_memory import HostBlocks
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.links import Links

BLOCK_SIZES = (16, 32, 64, 128, 256, 512)  # tokens
BYTES, REPEATS = 1 << 30, 5  # copied at once; times
MOVED, MOVED_SIZE = (1, 2, 4, 8, 16, 32, 64), 128  # blocks that one replica sends another, and their tokens
MOVES, PAUSE = 9, 0.3  # times; seconds before each


def copy_times(spec: ModelSpec) -> Links:
    """Returns the seconds of a block's copy to the host, and back, by the block's bytes: of scattered blocks and slots; with two GPUs `Links.kv_blocks`, too."""
    sizes = [float(tokens * spec.kv_bytes_per_token) for tokens in BLOCK_SIZES]
    times = [_seconds(spec, KVSize(number, tokens, number)) for tokens, number in _numbers(spec)]
    to_host, from_host = zip(*times, strict=True)
    reaches = torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1)
    return Links(
        to_host=PiecewiseLinear(tuple(sizes), to_host),
        from_host=PiecewiseLinear(tuple(sizes), from_host),
        kv_blocks=block_times(spec) if reaches else None,
    )


def _numbers(spec: ModelSpec) -> list[tuple[int, int]]:
    return [(tokens, max(BYTES // (tokens * spec.kv_bytes_per_token), 1)) for tokens in BLOCK_SIZES]


def _seconds(spec: ModelSpec, size: KVSize) -> tuple[float, float]:
    blocks, number = HostBlocks(PagedCache(spec, size, torch.device("cuda"))), size.num_blocks
    order = Random(0).sample(range(number), number)
    stream, times = torch.cuda.Stream(), list[float]()
    for copies in (Copies(out=[*enumerate(order)]), Copies(back=[*enumerate(order)])):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
        with torch.cuda.stream(stream):
            blocks.copy(copies)
            for event in events[:-1]:
                event.record()
                blocks.copy(copies)
            events[-1].record()
        events[-1].synchronize()
        taken = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
        times.append(float(f"{median(taken) / number:.4g}"))
    return times[0], times[1]


def block_times(spec: ModelSpec) -> PiecewiseLinear:
    """Times single copies of scattered blocks from the call until the host knows of the end, each after a pause: transfers are rare."""
    from cbatch.runtime.gpu.transfers import BlockCopier  # in Triton, which machines without a GPU lack

    size, draw = KVSize(MOVED[-1], MOVED_SIZE), np.random.default_rng(0)
    there, here = (PagedCache(spec, size, torch.device("cuda", place)) for place in (0, 1))
    copies, medians = BlockCopier([[there]], [[here]]), list[float]()
    for number in MOVED:
        times = []
        for _ in range(MOVES):
            pairs = [draw.permutation(size.num_blocks)[:number].astype(np.int32) for _ in range(2)]
            sleep(PAUSE)
            began = perf_counter()
            copies(pairs).wait()
            times.append(perf_counter() - began)
        medians.append(float(f"{median(times):.4g}"))
    block_bytes = MOVED_SIZE * spec.kv_bytes_per_token
    return PiecewiseLinear(tuple(float(number * block_bytes) for number in MOVED), tuple(medians))
