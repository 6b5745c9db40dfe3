"""The machine that is measured: an executor as a run would build it, and the sizes for which it has captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cbatch import ConfigError, Executor, Limits
from cbatch.kv import KVSize, blocks_for
from cbatch.model import ModelSpec
from experiments.config.backends import count_gpus
from experiments.profile.laboratory import Laboratory
from experiments.store.benchmark_file import cpu_name

CPU_BLOCK = 16

TILES = {"cuda": 128, "cpu": 16}
"""Tokens in steps of which the matrix products' time rises."""


class Machine(NamedTuple):
    """An executor and what is known of it.

    name: of the hardware. decode_sizes: requests of captured iterations without prompts; without graphs the powers of two.
    mixed_ranges: fewest and most tokens of the iterations with prompts that each captured shape takes; without graphs none.
    attention: which kernels attend.
    """

    name: str
    executor: Executor
    limits: Limits
    num_blocks: int
    block_size: int
    decode_sizes: Sequence[int]
    mixed_ranges: Sequence[tuple[int, int]]
    attention: str

    @property
    def mixed_sizes(self) -> list[int]:
        """Tokens that the captured iterations with prompts are padded to."""
        return [size for _, size in self.mixed_ranges]

    def laboratory(self, spec: ModelSpec) -> Laboratory:
        return Laboratory(
            self.executor,
            self.limits,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            vocabulary_size=spec.vocab_size,
        )


def hardware_name(backend: str) -> str:
    """What is measured.

    Raises:
        ConfigError: no such backend, or no GPU.
    """
    if backend not in TILES:
        raise ConfigError(f"profile: backend={backend} is unknown; give {' or '.join(TILES)}")
    if backend == "cpu":
        return cpu_name()
    if count_gpus() == 0:
        raise ConfigError("profile: backend=cuda needs a GPU and finds none; backend=cpu measures this machine's CPU")
    return torch.cuda.get_device_name()


def build(backend: str, spec: ModelSpec, *, batch: int, max_tokens: int, longest: int) -> Machine:
    """
    Args:
        backend: "cuda" or "cpu".
        batch, max_tokens: of an iteration. longest: tokens of a request.

    Raises:
        ConfigError: see `hardware_name`. CapacityError: the model does not fit.
    """
    name = hardware_name(backend)
    limits = Limits(batch, max_tokens, min(longest, spec.max_positions), tile=TILES[backend])
    return _gpu(name, spec, limits) if backend == "cuda" else _cpu(name, spec, limits)


def _gpu(name: str, spec: ModelSpec, limits: Limits) -> Machine:
    from cbatch.runtime.gpu import BLOCK_SIZE  # needs triton
    from cbatch.runtime.shapes import decode_sizes
    from experiments.bench.serving import release, start

    release()
    server = start(spec, limits)
    executor = server.executor
    cache = executor.iteration.cache
    for pages in (cache.keys, cache.values):
        pages.normal_()  # a model's own keys and values are about so large; zeros compute faster
    torch.cuda.synchronize()
    return Machine(
        name,
        executor,
        limits,
        server.num_blocks,
        BLOCK_SIZE,
        decode_sizes(limits.max_batch),
        executor.iteration.ranges,
        executor.attention,
    )


def _cpu(name: str, spec: ModelSpec, limits: Limits) -> Machine:
    from cbatch.runtime import cpu

    num_blocks = limits.max_batch * blocks_for(limits.max_request_tokens, CPU_BLOCK)
    executor = cpu.build(spec, limits, KVSize(num_blocks, CPU_BLOCK))
    sizes = [2**power for power in range(limits.max_batch.bit_length()) if 2**power < limits.max_batch]
    return Machine(name, executor, limits, num_blocks, CPU_BLOCK, [*sizes, limits.max_batch], (), "reference")


def memory_bytes(backend: str) -> float:
    """Of the device that is measured."""
    if backend == "cuda":
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        return float(properties.total_memory)
    import os

    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
