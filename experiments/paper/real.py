"""Steady states of equal requests with real tokens, on the GPU at hand or, with a small model, on a CPU.

One executor is built for the largest of the loads and serves them all, one after the other: weights are loaded and graphs
captured once. Times are the host's clock between the ends of requests, whatever the device and the host did. The policies,
the requests and what is counted are those of `steady`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cbatch import ConfigError, Engine, Limits
from cbatch.kv import KVSize, blocks_for
from cbatch.model import ModelSpec
from cbatch.runtime.executor import StreamExecutor
from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile_file import load_profile
from experiments.config.backends import count_gpus
from experiments.config.presets import load_spec
from experiments.paper.steady import (
    WARM_UP,
    Load,
    Scheme,
    SteadyState,
    counted,
    limits_of,
    policy_of,
    requests_of,
    tile_of,
)

MODEL, PROFILE = "llama-13b", "h200"
LARGEST = (Load(1024, 18, 1), Load(2048, 10, 1), Load(3072, 6, 1))
"""The batches of SARATHI (arXiv 2308.16369), Fig 9, that the executor is built for."""
COUNTED = 1
"""Generations of requests that are measured, after as many of warm-up as in simulation."""


@dataclass(eq=False)
class RealSteadyState(SteadyState):
    """Measures loads by serving them. `cost` predicts single iterations from the profile of the same kind of GPU.

    largest: limits and KV blocks that the executor was built for; loads must keep within them.
    """

    executor: StreamExecutor = field(kw_only=True)
    hardware: str = field(kw_only=True)
    num_blocks: int = field(kw_only=True)
    block_size: int = field(kw_only=True)

    def provenance(self) -> dict[str, Any]:
        return {
            "measured_on": self.hardware,
            "model": self.cost.spec.name,
            "counted_generations": COUNTED,
            "single_iterations": self.cost.provenance(),
        }

    def origin(self) -> str:
        served = f"served with real tokens on {self.hardware}" if self.num_asked else "nothing is served"
        return f"{served}; single iterations are predicted by profile {self.cost.profile.name}"

    def close(self) -> None:
        self.executor.close()

    def _run(self, scheme: Scheme, load: Load, chunk: int) -> float:
        limits = limits_of(load, tile_of(self.cost, chunk))
        engine = Engine(
            policy_of(scheme, chunk),
            self.executor,
            limits,
            self.cost,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
        )
        engine.submit(requests_of(scheme, load, WARM_UP + COUNTED + 1, self.executor.vocabulary))
        begin, end = counted(engine.run(), load, COUNTED)
        return (end - begin) / (COUNTED * load.batch)


def on_gpu() -> RealSteadyState:
    """The GPU at hand with LLaMA-13B.

    Raises:
        ConfigError: there is no GPU. CapacityError: its memory does not hold the model and a batch.
    """
    if count_gpus() == 0:
        raise ConfigError("hardware=gpu, but there is no GPU; leave it out to simulate")
    import torch

    from cbatch.runtime import gpu  # its kernels need what only a GPU's machine has

    spec = load_spec(MODEL)
    limits, num_blocks = _largest(gpu.BLOCK_SIZE)
    executor = gpu.build(spec, limits, KVSize(num_blocks, gpu.BLOCK_SIZE))
    return _state(spec, executor, limits, torch.cuda.get_device_name(), num_blocks, gpu.BLOCK_SIZE)


def on_cpu(spec: ModelSpec, largest: Load, block_size: int = 16) -> RealSteadyState:
    """The same on this machine's CPU, for a model that is small enough."""
    from cbatch.runtime import cpu
    from experiments.store.benchmark_file import cpu_name

    num_blocks = _blocks(largest, block_size)
    limits = Limits(largest.batch, largest.batch * largest.length, largest.length)
    executor = cpu.build(spec, limits, KVSize(num_blocks, block_size))
    return _state(spec, executor, limits, cpu_name(), num_blocks, block_size)


def _largest(block_size: int) -> tuple[Limits, int]:
    """Limits and KV blocks that hold every one of the largest loads."""
    limits = Limits(
        max(load.batch for load in LARGEST),
        max(load.batch * load.length for load in LARGEST),
        max(load.length for load in LARGEST),
    )
    return limits, max(_blocks(load, block_size) for load in LARGEST)


def _blocks(load: Load, block_size: int) -> int:
    """For two batches: blocks come free an iteration after their request has ended, and a whole batch may end at once."""
    return 2 * load.batch * blocks_for(load.length, block_size)


def _state(
    spec: ModelSpec, executor: StreamExecutor, limits: Limits, hardware: str, num_blocks: int, block_size: int
) -> RealSteadyState:
    cost = ProfileCost(load_profile(PROFILE), spec, max_batch=limits.max_batch)
    return RealSteadyState(cost, executor=executor, hardware=hardware, num_blocks=num_blocks, block_size=block_size)
