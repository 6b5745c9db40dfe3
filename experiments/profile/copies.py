"""Times copies of KV blocks between a GPU and pinned host memory, as `runtime.host_memory` makes them."""

from itertools import pairwise
from random import Random
from statistics import median

import torch

from cbatch import KVSize, ModelSpec
from cbatch.kv import Copies
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.host_memory import HostBlocks
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.links import Links

BLOCK_SIZES = (16, 32, 64, 128, 256, 512)  # tokens
BYTES, REPEATS = 1 << 30, 5  # copied at once; times


def copy_times(spec: ModelSpec) -> Links:
    """Returns the seconds of a block's copy to the host, and back, by the block's bytes: of scattered blocks and slots."""
    sizes = [float(tokens * spec.kv_bytes_per_token) for tokens in BLOCK_SIZES]
    times = [_seconds(spec, KVSize(number, tokens, number)) for tokens, number in _numbers(spec)]
    to_host, from_host = zip(*times, strict=True)
    return Links(to_host=PiecewiseLinear(tuple(sizes), to_host), from_host=PiecewiseLinear(tuple(sizes), from_host))


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
