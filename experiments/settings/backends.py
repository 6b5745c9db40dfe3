"""The places where a run executes, chosen by `backend=`: simulated hardware, this machine's CPU, or its GPU.

Only the chosen backend's packages are loaded: a simulated run imports no torch.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from cbatch import ConfigError, Executor, KVSize, ModelSpec
from cbatch.cluster.transfers import Copier
from cbatch.errors import check_installed
from cbatch.kv import blocks_for
from cbatch.model import split_layers
from cbatch.model.topology import Degree, Network, Topology, split_ranks
from cbatch.runtime.options import AttentionName, Options
from cbatch.sim import HostTime, PlanningExecutor, Profile, ProfileCost, SimExecutor
from cbatch.validation import Give, not_negative
from experiments.report.notes import PLANNING
from experiments.settings.backend import Backend, ExecutorParts
from experiments.settings.hardware import CPU, card_name, cost_model, count_gpus, cpu_name
from experiments.workloads import Vocabulary

_Seconds = Annotated[float, not_negative("seconds")]
Sizes = Annotated[list[int] | Literal["auto"], Give("the number of layers of each stage, as in [17,15], or auto")]
_HOST_SECONDS = Give("seconds of host time per iteration, measured, or auto")
HostSeconds = Annotated[_Seconds | Literal["auto", "measured"], _HOST_SECONDS]


@dataclass(frozen=True, kw_only=True)
class Simulated(Backend):
    """Predicted time on the GPUs of a hardware profile.

    host_seconds: host time per iteration; "auto": the profile's; "measured": plus the time of each of the policy's plans on this machine.
    server_seconds: time that a request spends in a server before the engine sees it, beside the profile's.
    tensor_parallel, pipeline_stages, replicas, gpus_per_node, network: see `cbatch.model.topology.Topology`.
    """

    host_seconds: HostSeconds = "auto"
    server_seconds: _Seconds = 0.0
    gpus_per_node: Degree = 8
    network: Network = None

    name = "sim"
    simulated = True

    @property
    def _topology(self) -> Topology:
        return Topology(self.tensor_parallel, self.pipeline_stages, self.replicas, self.gpus_per_node, self.network)

    def cost(self, hardware: str, spec: ModelSpec, max_batch: int) -> ProfileCost:
        return cost_model(hardware, spec, self._topology, max_batch)

    def hardware(self, profile: Profile) -> str:
        return profile.hardware

    def default_block_size(self, profile: Profile) -> int:
        return profile.block_size

    def vocabulary(self, spec: ModelSpec) -> Vocabulary | None:
        return None

    def kv_tokens(self, parts: ExecutorParts, block_size: int) -> tuple[int, str]:
        drafter, profile = parts.options.drafter, parts.cost.profile
        draft_model = None if drafter is None else drafter.model
        tokens = profile.kv_tokens(parts.model, parts.limits.max_tokens, self._topology, draft_model)
        return tokens, f"beside weights and activations on {profile.name}"

    def executor(self, parts: ExecutorParts, kv: KVSize) -> Executor:
        cost = parts.cost
        if not isinstance(self.host_seconds, str):
            return SimExecutor(cost, HostTime(self.host_seconds), self.server_seconds)
        kind = SimExecutor if self.host_seconds == "auto" else PlanningExecutor
        return kind(cost, cost.profile.host_time(parts.asynchronous, parts.model), self.server_seconds)

    def facts(self, executors: Sequence[Any], cost: ProfileCost, asynchronous: bool) -> dict[str, Any]:
        num_eager = sum(used.num_eager for used in {each.cost for each in executors})
        own_host = not isinstance(self.host_seconds, str)
        origin = cost.provenance(asynchronous, own_host=own_host, in_graphs=not num_eager)
        origin["eager_iterations"] = num_eager
        origin["stages"] = [asdict(account) for each in executors for account in each.accounts()]
        if self.host_seconds != "measured":
            return origin
        return origin | {"planning": {key: sum(getattr(each, key) for each in executors) for key in PLANNING}}


@dataclass(frozen=True, kw_only=True)
class Real(Backend):
    """Real tokens; on a CPU each pipeline stage has its own thread.

    layers: number of layers of each stage, as in [17,15]; the last one also has the output head. "auto": equally many.
    """

    layers: Sizes = "auto"

    @property
    def sizes(self) -> tuple[int, ...] | None:
        return None if self.layers == "auto" else tuple(self.layers)

    def check_here(self) -> None:
        check_installed("real", "torch", "transformers")

    def cost(self, hardware: str, spec: ModelSpec, max_batch: int) -> ProfileCost:
        split_layers(spec, self.pipeline_stages, self.sizes)  # these raise ConfigError before weights are loaded
        split_ranks(spec, self.tensor_parallel)
        return super().cost(hardware, spec, max_batch)

    def facts(self, executors: Sequence[Any], cost: ProfileCost, asynchronous: bool) -> dict[str, Any]:
        topology = {key: getattr(self, key) for key in ("tensor_parallel", "pipeline_stages", "replicas")}
        return {"topology": topology, **super().facts(executors, cost, asynchronous)}

    @abstractmethod
    def copies(self, sender: Any, receiver: Any) -> Copier:
        """Returns a function that begins to copy KV blocks between two executors: see `cbatch.cluster.Moves`."""

    def _with_own(self, options: Options) -> Options:
        return replace(options, layers=self.sizes, tensor_parallel=self.tensor_parallel)


@dataclass(frozen=True, kw_only=True)
class Cpu(Real):
    """Real tokens on this machine's CPU. Predictions are of the whole model: stages and ranks share its cores."""

    name = "cpu"
    predicts_with = CPU
    num_devices = 1

    def hardware(self, profile: Profile) -> str:
        return cpu_name()

    def tile(self, profile: Profile) -> int:
        return 1

    def kv_tokens(self, parts: ExecutorParts, block_size: int) -> tuple[int, str]:
        limits = parts.limits
        longest = blocks_for(limits.max_request_tokens, block_size) * block_size
        return limits.max_batch * limits.num_stages * longest, "the largest batch at its longest"

    def check_fits(self, parts: ExecutorParts, kv: KVSize) -> None:
        from cbatch.runtime import cpu

        cpu.check_fits(parts.model, parts.limits, kv, self.replicas, parts.options.drafter)

    def executor(self, parts: ExecutorParts, kv: KVSize) -> Executor:
        from cbatch.runtime import cpu

        return cpu.build(parts.model, parts.limits, kv, self._with_own(parts.options))

    def copies(self, sender: Any, receiver: Any) -> Copier:
        from cbatch.runtime.transfers import HostCopy, copy_blocks

        return lambda pairs: HostCopy(partial(copy_blocks, sender.caches, receiver.caches, pairs), receiver.follow)


@dataclass(frozen=True, kw_only=True)
class Cuda(Real):
    """Real tokens on this machine's GPU, or a GPU for each rank of each pipeline stage of each replica.

    attention: the kernel for prompt chunks: "flash4", "triton", or "auto" for the faster one that fits.
    devices: the GPU of each replica, which then has one; replicas may share a GPU. None: each has the next GPUs.
    """

    attention: AttentionName = "auto"
    devices: Annotated[list[int], Give("the GPU of each replica, as in [0,0]")] | None = None

    name = "cuda"
    block_size = 128  # the page size at which paged attention is fastest

    def check_here(self) -> None:
        super().check_here()
        if count_gpus() == 0:
            raise ConfigError("backend=cuda: no GPU found; choose backend=sim or backend=cpu")
        if self.devices is not None:
            if len(self.devices) != self.replicas:
                problem = f"backend.devices={self.devices}: names {len(self.devices)} GPUs for {self.replicas} replicas"
                raise ConfigError(f"{problem}; give one for each")
            if not all(0 <= device < count_gpus() for device in self.devices):
                raise ConfigError(f"backend.devices={self.devices}: give numbers from 0 to {count_gpus() - 1}")

    def cost(self, hardware: str, spec: ModelSpec, max_batch: int) -> ProfileCost:
        """Predicts as if all stages had as many layers as the largest. Raises ConfigError for the speed of another card."""
        most = max(part.size for part in split_layers(spec, self.pipeline_stages, self.sizes))
        even = replace(spec, num_layers=most * self.pipeline_stages)
        cost = cost_model(hardware, even, self._topology, max_batch=max_batch)
        if (card := cost.profile.card.name) and card != (here := card_name()):
            remedy = f"give hardware={cost.profile.name}, or measure this card: python -m experiments.profile card"
            raise ConfigError(f"hardware={hardware}: was fitted to {card}, but this is {here}; {remedy}")
        return cost

    @property
    def _topology(self) -> Topology:
        return Topology(self.tensor_parallel, self.pipeline_stages)

    def place(self, first_gpu: int) -> AbstractContextManager[Any]:
        import torch

        gpu = torch.cuda.current_device() + first_gpu if self.devices is None else self.devices[first_gpu]
        return torch.cuda.device(gpu)

    def meter(self, executors: Sequence[Any], now: Callable[[], float]) -> AbstractContextManager[Any]:
        """In the order of replicas, their stages, and the stages' ranks."""
        import torch

        from cbatch.runtime.gpu.energy import EnergyMeter, nvml_counters

        ranks = (cache for each in executors for stage in each.caches for cache in stage[: self.tensor_parallel])
        devices = [rank.keys.device for rank in ranks]
        uuids = [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
        return EnergyMeter(partial(nvml_counters, uuids), now)

    def hardware(self, profile: Profile) -> str:
        import torch

        return torch.cuda.get_device_name()

    def check_number(self, number: int) -> None:
        import torch

        if self.devices is None and number > (available := torch.cuda.device_count() - torch.cuda.current_device()):
            problem = f"backend.pools: need {number} GPUs together, and PyTorch finds {available}"
            raise ConfigError(f"{problem}; give fewer replicas, or simulate the others with backend=sim")

    def kv_tokens(self, parts: ExecutorParts, block_size: int) -> tuple[int, str]:
        from cbatch.runtime.gpu import build as gpu

        if self.devices is not None and len({*self.devices}) < len(self.devices):
            raise ConfigError(f"backend.devices={self.devices}: replicas share a GPU; give kv_tokens")
        num_tokens = gpu.kv_tokens_beside(parts.model, parts.limits, self._with_own(parts.options))
        return num_tokens, "beside weights and iterations in the free memory"

    def check_fits(self, parts: ExecutorParts, kv: KVSize) -> None:
        from cbatch.runtime.gpu import build as gpu
        from cbatch.runtime.gpu.devices import check_number

        if self.devices is None:
            check_number(self.pipeline_stages, self.tensor_parallel, self.replicas)
        elif self.gpus_per_replica > 1:
            raise ConfigError(f"backend.devices={self.devices}: each replica has one GPU; leave it out")
        gpu.check_fits(parts.model, parts.limits, kv, self._with_own(parts.options))

    def executor(self, parts: ExecutorParts, kv: KVSize) -> Executor:
        from cbatch.runtime.gpu import build as gpu

        return gpu.build(parts.model, parts.limits, kv, self._with_own(parts.options))

    def copies(self, sender: Any, receiver: Any) -> Copier:
        from cbatch.runtime.gpu.transfers import BlockCopier

        return BlockCopier(sender.caches, receiver.caches, receiver.follow)

    def _with_own(self, options: Options) -> Options:
        return replace(super()._with_own(options), attention=self.attention)

    def facts(self, executors: Sequence[Any], cost: ProfileCost, asynchronous: bool) -> dict[str, Any]:
        names = {"replayed_iterations": "num_replayed", "eager_iterations": "num_eager"}
        counts = {key: sum(getattr(each.iteration, name) for each in executors) for key, name in names.items()}
        kernels = {"attention": executors[0].attention, "products": executors[0].products}
        return {**kernels, **counts, **super().facts(executors, cost, asynchronous)}


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Chooses a GPU if the driver finds one, else simulation."""

    name = "auto"

    def choose(self) -> tuple[Backend, str]:
        """Returns the backend and the reason for it."""
        found = count_gpus()
        return (Cuda(), f"{found} GPU found") if found else (Simulated(), "no GPU found")
