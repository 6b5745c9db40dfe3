"""The measured machine: a server built as for a run, the sizes of its captured graphs, and the ceilings."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from cbatch import ConfigError, Limits, ModelSpec, Server
from cbatch.drafts import NgramDrafter
from cbatch.runtime.fast.graph_shapes import decode_sizes
from cbatch.runtime.options import Options
from cbatch.sim.roofline import Ceilings
from experiments.profile.laboratory import FittedLaboratory, Laboratory
from experiments.settings.backends import Cpu, Cuda
from experiments.settings.hardware import count_gpus, cpu_name
from experiments.setup.pools import LARGEST_ITERATION
from experiments.setup.servers import real_server, release_memory

TILES = {"cuda": 128, "cpu": 16}  # tokens per step in the time of matrix products
REPEATS = 15  # timings per operation when measuring ceilings


class Machine(NamedTuple):
    """A server and its hardware.

    name: the name of the hardware.
    decode_sizes: requests of captured iterations without prompts; powers of two if there are no graphs.
    mixed_sizes: tokens of captured iterations with prompts; empty if there are no graphs.
    attention: the attention kernels.
    """

    name: str
    server: Server
    decode_sizes: Sequence[int]
    mixed_sizes: Sequence[int]
    attention: str

    def laboratory(self, spec: ModelSpec) -> Laboratory:
        return (Laboratory if self.mixed_sizes else FittedLaboratory)(self.server, spec.vocab_size)


def hardware_name(backend: str) -> str:
    """Returns the name of the hardware to measure. Raises ConfigError for an unknown backend or a missing GPU."""
    if backend not in TILES:
        raise ConfigError(f"profile: backend={backend} is unknown; give {' or '.join(TILES)}")
    if backend == "cpu":
        return cpu_name()
    if count_gpus() == 0:
        problem = "backend=cuda needs a GPU, and there is none"
        raise ConfigError(f"profile: {problem}; backend=cpu measures this machine's CPU")
    return torch.cuda.get_device_name()


def build(
    backend: str,
    spec: ModelSpec,
    *,
    batch: int,
    max_tokens: int,
    longest: int,
    tensor_parallel: int = 1,
    drafts: int = 0,
) -> Machine:
    """Builds a machine on "cuda" or "cpu".

    batch, max_tokens: limits of an iteration. longest: most tokens of a request. The model's positions limit both numbers of tokens,
    but max_tokens not below `LARGEST_ITERATION`.
    tensor_parallel: GPUs that share every layer. drafts: most of a request, made by n-grams; decode_sizes are then rows.
    Raises ConfigError as in `hardware_name`, and CapacityError if the model does not fit.
    """
    name = hardware_name(backend)
    most = min(max_tokens, max(LARGEST_ITERATION, spec.max_positions))
    limits = Limits(batch, most, min(longest, spec.max_positions), tile=TILES[backend], max_drafts=drafts)
    options = Options(drafter=NgramDrafter(drafts) if drafts else None)
    if backend == "cpu":
        rows = limits.max_rows
        sizes = [2**power for power in range(rows.bit_length()) if 2**power < rows]
        return Machine(name, real_server(Cpu(), spec, limits, options), [*sizes, rows], (), "reference")
    release_memory()
    server = real_server(Cuda(tensor_parallel=tensor_parallel), spec, limits, options)
    iteration = server.executor.iteration
    for cache in iteration.caches:
        for pages in (cache.keys, cache.values):
            pages.normal_()  # similar in size to real keys and values; zeros compute faster
        torch.cuda.synchronize(cache.keys.device)
    return Machine(name, server, decode_sizes(batch, limits.max_rows), iteration.mixed_sizes, server.executor.attention)


def ceilings(device: torch.device, tile: int) -> Ceilings:
    """Measures the bytes/s of a copy on the device, counting reads and writes, and the FLOP/s of large products.

    Products in float32 are without TF32, which no runtime enables.
    """
    on_gpu = device.type == "cuda"
    size, edge = (2**31, 8192) if on_gpu else (2**24, 256)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = _median(partial(target.copy_, source), on_gpu)

    def rate(dtype: torch.dtype, edge: int) -> float:
        square = torch.randn((edge, edge), device=device).to(dtype)
        return 2 * edge**3 / _median(partial(torch.mm, square, square), on_gpu)

    slow: Any = {str(dtype).removeprefix("torch."): rate(dtype, edge // 2) for dtype in (torch.float32, torch.float64)}
    return Ceilings(2 * size / copied, rate(torch.bfloat16, edge), tile, slow)


def _median(operation: Callable[[], object], on_gpu: bool) -> float:
    """Returns the median seconds of `REPEATS` calls after three warm-up calls."""
    for _ in range(3):
        operation()
    return float(np.median([_once(operation, on_gpu) for _ in range(REPEATS)]))


def _once(operation: Callable[[], object], on_gpu: bool) -> float:
    """Returns the seconds of a call. On a CPU at most the CPU time of all threads, which does not grow while other processes run."""
    if not on_gpu:
        begun = time.perf_counter(), time.process_time()
        operation()
        return min(time.perf_counter() - begun[0], time.process_time() - begun[1])
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    operation()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
