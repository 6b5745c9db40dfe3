"""Where a run takes place: simulated, on this machine's CPU, or on its GPU. Each is chosen by `backend=`.

Only the chosen backend's packages are loaded: a simulated run imports no torch.
"""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Protocol, get_args

from cbatch import ConfigError, Executor, Limits
from cbatch.kv import KVSize, blocks_for
from cbatch.model import ModelSpec
from cbatch.runtime.options import Options
from cbatch.sim.cluster import make_router
from cbatch.sim.cost import Outside, ProfileCost
from cbatch.sim.executor import SimExecutor
from cbatch.sim.profile import HostTime, Profile
from cbatch.sim.topology import Topology
from cbatch.validation import Give, Switch, check, not_negative
from experiments.store.benchmark_file import cpu_name
from experiments.workloads import Vocabulary

Graphs = Literal["off", "decode", "all"]
GRAPHS = get_args(Graphs)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How the engine and the executor run.

    asynchronous: plan and launch an iteration while the one before is computed.
    graphs: which iterations replay a captured CUDA graph: "off", "decode" (those without prompts) or "all".
    compile: compute real tokens with `transformers`' modules, compiled by `torch.compile`, in place of the fused model.
    check: of executors with real tokens; "poison" fills what must not be read and reports when it was, "races" checks
        that accesses to the same memory are in an order, "off" does neither.
    times_copies: have executors with real tokens tell when their copies ran; no setting of its own, timelines ask for it.
    """

    asynchronous: Switch
    graphs: Graphs
    compile: Switch
    check: Literal["off", "poison", "races"]
    times_copies: bool = False

    def __post_init__(self) -> None:
        check(self, "runtime.")


class Backend(Protocol):
    """A place to run.

    name: as in the results. simulated: whether times are predicted. block_size: tokens of a KV block by default.
    """

    name: str
    simulated: bool
    block_size: int

    def cost(self, profile: Profile, spec: ModelSpec, max_batch: int) -> ProfileCost:
        """What policies predict iterations with; its topology is the run's."""
        ...

    def hardware(self, profile: Profile) -> str:
        """What the figures are true of."""
        ...

    def tile(self, profile: Profile) -> int:
        """Tokens by which matrix products step here; 1: not known."""
        ...

    def vocabulary(self, spec: ModelSpec) -> Vocabulary | None:
        """The model's tokens; None where there are none."""
        ...

    def kv_tokens(self, spec: ModelSpec, profile: Profile, limits: Limits, block_size: int) -> tuple[int, str]:
        """The default size of the KV cache in tokens, and why."""
        ...

    def executor(
        self, spec: ModelSpec, cost: ProfileCost, limits: Limits, runtime: Runtime, num_blocks: int, block_size: int
    ) -> Executor: ...

    def facts(self, executor: Any, cost: ProfileCost) -> dict[str, Any]:
        """What is to be known of a run that has ended: which kernels ran, or where simulated times come from."""
        ...


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Predicted time on the GPUs of a hardware profile.

    host_seconds: host time that each iteration takes; "auto" is the profile's.
    tensor_parallel, pipeline_stages, replicas, gpus_per_node: see `cbatch.sim.topology.Topology`.
    router: round_robin or least_loaded, over the replicas.
    outside: "mark" counts iterations outside what was measured, "error" refuses them.
    """

    host_seconds: Annotated[
        Annotated[float, not_negative("seconds")] | Literal["auto"], Give("seconds of host time per iteration, or auto")
    ] = "auto"
    tensor_parallel: int = 1
    pipeline_stages: int = 1
    replicas: int = 1
    gpus_per_node: int = 8
    router: str = "round_robin"
    outside: Outside = "mark"

    name = "sim"
    simulated = True
    block_size = 16

    def __post_init__(self) -> None:
        check(self, "backend.")
        make_router(self.router)

    @property
    def _topology(self) -> Topology:
        return Topology(self.tensor_parallel, self.pipeline_stages, self.replicas, self.gpus_per_node)

    def cost(self, profile: Profile, spec: ModelSpec, max_batch: int) -> ProfileCost:
        return ProfileCost(profile, spec, self._topology, self.outside, max_batch)

    def hardware(self, profile: Profile) -> str:
        return profile.hardware

    def tile(self, profile: Profile) -> int:
        return profile.ceilings.tile

    def vocabulary(self, spec: ModelSpec) -> Vocabulary | None:
        return None

    def kv_tokens(self, spec: ModelSpec, profile: Profile, limits: Limits, block_size: int) -> tuple[int, str]:
        return profile.kv_tokens(spec, self._topology), f"beside the weights on {profile.name}"

    def executor(
        self, spec: ModelSpec, cost: ProfileCost, limits: Limits, runtime: Runtime, num_blocks: int, block_size: int
    ) -> Executor:
        if self.host_seconds == "auto":
            return SimExecutor(cost, cost.profile.host(runtime.asynchronous))
        return SimExecutor(cost, HostTime(self.host_seconds))

    def facts(self, executor: Any, cost: ProfileCost) -> dict[str, Any]:
        return {**cost.provenance(), "stages": [asdict(account) for account in executor.accounts()]}


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """Real tokens on this machine's CPU."""

    name = "cpu"
    simulated = False
    block_size = 16

    def cost(self, profile: Profile, spec: ModelSpec, max_batch: int) -> ProfileCost:
        return ProfileCost(profile, spec, max_batch=max_batch)

    def hardware(self, profile: Profile) -> str:
        return cpu_name()

    def tile(self, profile: Profile) -> int:
        return 1

    def vocabulary(self, spec: ModelSpec) -> Vocabulary | None:
        from cbatch.vocabulary import Vocabulary

        return Vocabulary(spec)

    def kv_tokens(self, spec: ModelSpec, profile: Profile, limits: Limits, block_size: int) -> tuple[int, str]:
        longest = blocks_for(limits.max_request_tokens, block_size) * block_size
        return limits.max_running * longest, "the largest batch at its longest"

    def executor(
        self, spec: ModelSpec, cost: ProfileCost, limits: Limits, runtime: Runtime, num_blocks: int, block_size: int
    ) -> Executor:
        from cbatch.runtime import cpu

        options = Options(check=runtime.check, compiled=runtime.compile, times_copies=runtime.times_copies)
        return cpu.build(spec, limits, KVSize(num_blocks, block_size), options)

    def facts(self, executor: Any, cost: ProfileCost) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """Real tokens on this machine's GPU.

    attention: the kernels that attend, by a name of `cbatch.runtime.fast.attention.choice`; "auto" is the fastest that fits.
    """

    attention: str = "auto"

    name = "cuda"
    simulated = False
    block_size = 128  # the page size at which paged attention is fastest

    def __post_init__(self) -> None:
        if count_gpus() == 0:
            raise ConfigError("backend=cuda: no GPU found; choose backend=sim or backend=cpu")

    def cost(self, profile: Profile, spec: ModelSpec, max_batch: int) -> ProfileCost:
        return ProfileCost(profile, spec, max_batch=max_batch)

    def hardware(self, profile: Profile) -> str:
        import torch

        return torch.cuda.get_device_name()

    def tile(self, profile: Profile) -> int:
        return profile.ceilings.tile

    def vocabulary(self, spec: ModelSpec) -> Vocabulary | None:
        from cbatch.vocabulary import Vocabulary

        return Vocabulary(spec)

    def kv_tokens(self, spec: ModelSpec, profile: Profile, limits: Limits, block_size: int) -> tuple[int, str]:
        from cbatch.runtime import gpu

        return gpu.kv_tokens_beside(spec, limits), "beside weights and iterations in the free memory"

    def executor(
        self, spec: ModelSpec, cost: ProfileCost, limits: Limits, runtime: Runtime, num_blocks: int, block_size: int
    ) -> Executor:
        from cbatch.runtime import gpu

        options = Options(
            check=runtime.check,
            compiled=runtime.compile,
            graphs=runtime.graphs,
            attention=self.attention,
            times_copies=runtime.times_copies,
        )
        return gpu.build(spec, limits, KVSize(num_blocks, block_size), options)

    def facts(self, executor: Any, cost: ProfileCost) -> dict[str, Any]:
        iteration = executor.iteration
        return {
            "attention": executor.attention,
            "replayed_iterations": iteration.num_replayed,
            "eager_iterations": iteration.num_eager,
        }


@dataclass(frozen=True, kw_only=True)
class Auto:
    """A GPU if the driver finds one, else simulation."""

    name = "auto"

    def choose(self) -> tuple[Backend, str]:
        """The backend, and why it was chosen."""
        num_gpus = count_gpus()
        return (Simulated(), "no GPU found") if num_gpus == 0 else (Cuda(), f"{num_gpus} GPU found")


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use, asked of the driver itself: importing torch takes seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
