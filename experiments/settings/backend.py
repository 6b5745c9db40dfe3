"""The interface of a backend; `backends` has the three that `backend=` chooses from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from cbatch import ConfigError, Described, Executor, KVSize, Limits, ModelSpec
from cbatch.cluster import Router
from cbatch.model.topology import Degree
from cbatch.runtime.options import Options
from cbatch.sim import Profile, ProfileCost
from cbatch.validation import Give, Switch, check, nearest, not_negative, positive, whole
from experiments.settings.hardware import cost_model
from experiments.workloads import Vocabulary
from policies.routers import ROUTERS

RoleName = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Pool(Described):
    """The keys in which a pool of replicas differs from the run. None: as the run's.

    policy: arguments of the policy. role: whether its replicas compute prompts, continue requests of others, or do both.
    router: chooses one of the pool's replicas, once the run's router has chosen the pool. None: the run's router chooses both.
    """

    replicas: Degree | None = None
    hardware: str | None = None
    price: Annotated[float, not_negative("dollars per hour of one GPU")] | None = None
    tensor_parallel: Degree | None = None
    pipeline_stages: Degree | None = None
    batch: Annotated[int, whole(1)] | None = None
    max_tokens: Annotated[int, whole(1)] | None = None
    kv_tokens: Annotated[int, whole(1)] | None = None
    block_size: Annotated[int, whole(1)] | None = None
    role: RoleName | None = None
    router: Any = None
    policy: Annotated[Mapping[str, Any], Give("arguments of the policy, as in {budget: 512}")] | None = None


Pools = Annotated[Mapping[str, Pool], Give("pools by name, as in {large: {replicas: 2, batch: 64}, ...}")]


@dataclass(frozen=True, kw_only=True, repr=False)
class Scaling(Described):
    """How replicas start and stop under `autoscale`: see `cbatch.cluster.Scaling`."""

    tick: Annotated[float, positive("seconds")] = 15.0
    start_seconds: Annotated[float, not_negative("seconds")] = 240.0
    least: Annotated[int, whole(1)] = 1
    up_after: Annotated[float, not_negative("seconds")] = 0.0
    down_after: Annotated[float, not_negative("seconds")] = 300.0


@dataclass(frozen=True, kw_only=True, repr=False)
class Transfers(Described):
    """How requests move between replicas with roles: see `cbatch.cluster.Moves`. layerwise: with push. lease: None: without end."""

    push: Switch = False
    layerwise: Switch = False
    lease: Annotated[float, positive("seconds")] | None = None
    fair: Switch = True

    def __post_init__(self) -> None:
        if self.layerwise and not self.push:
            problem = "backend.transfers.layerwise=true: the decoder needs blocks before"
            raise ConfigError(f"{problem}; give backend.transfers.push=true")


class ExecutorParts(NamedTuple):
    """What an executor is built from, but for its KV cache. asynchronous: the engine's loop."""

    model: ModelSpec
    cost: ProfileCost
    limits: Limits
    options: Options
    asynchronous: bool = True


@dataclass(frozen=True, kw_only=True)
class Backend(ABC):
    """Where a run executes; the defaults suit real tokens.

    name: as in the results. simulated: whether times are predicted. block_size: default tokens per KV block of real tokens.
    predicts_with: profile for the predictions of policies where no settings name one.
    tensor_parallel: ranks that share every layer, on a GPU each; on a CPU they take turns.
    pipeline_stages: consecutive parts of the model; that many iterations are in flight.
    replicas: copies of the model, each with its own queue. router: assigns requests to them: a name in
        `policies.routers.ROUTERS`, or an object with the method of `cbatch.cluster.Router`.
    pools: unlike replicas, by the name of their pool. staleness: seconds until the router can read a replica's report.
    scaling: how replicas start and stop, if there is an autoscaler. transfers: between replicas of pools with roles.
    role: of a pool's replicas.
    """

    name: ClassVar[str]
    simulated: ClassVar[bool] = False
    block_size: ClassVar[int] = 16
    predicts_with: ClassVar[str] = "h200"
    tensor_parallel: Degree = 1
    pipeline_stages: Degree = 1
    replicas: Degree = 1
    router: Any = "round_robin"
    pools: Pools | None = None
    staleness: Annotated[float, not_negative("seconds")] = 0.0
    scaling: Scaling = Scaling()
    transfers: Transfers = Transfers()
    role: RoleName = "both"

    def __post_init__(self) -> None:
        check(self, "backend.")
        if self.pools is not None:
            if not self.pools:
                raise ConfigError("backend.pools={}: give at least one pool, as in {large: {batch: 64}}")
            number = sum(pool.replicas or 1 for pool in self.pools.values())
            if self.replicas not in (1, number):
                problem = f"backend.replicas={self.replicas}: beside backend.pools, whose replicas are {number}"
                raise ConfigError(f"{problem}; leave it out")
            object.__setattr__(self, "replicas", number)
        object.__setattr__(self, "router", _router("backend.router", self.router))
        for name, router in self.routers.items():
            key = f"backend.pools.{name}.router"
            object.__setattr__((self.pools or {})[name], "router", router := _router(key, router))
            for each in (self.router, router):
                if getattr(each, "moves", False):
                    problem = f"{type(each).__name__} chooses two replicas of a request, among those of all pools"
                    raise ConfigError(f"{key}: {problem}; leave out the pools' routers")

    @property
    def routers(self) -> dict[str, Any]:
        """Returns the routers of the pools that have one of their own, by name."""
        return {name: pool.router for name, pool in (self.pools or {}).items() if pool.router is not None}

    def check_here(self) -> None:  # noqa: B027 - a simulation runs everywhere
        """Raises ConfigError if this machine lacks the hardware or the packages."""

    def cost(self, hardware: str, spec: ModelSpec, max_batch: int) -> ProfileCost:
        """Returns the cost model for policies; its topology is the run's."""
        return cost_model(hardware, spec, max_batch=max_batch)

    @abstractmethod
    def hardware(self, profile: Profile) -> str:
        """Returns the name of the hardware that the figures hold for."""

    def default_block_size(self, profile: Profile) -> int:
        """Returns the tokens per KV block of `block_size=auto`."""
        return self.block_size

    def tile(self, profile: Profile) -> int:
        """Returns the tile of matrix products in tokens; 1: unknown."""
        return profile.ceilings.tile

    def vocabulary(self, spec: ModelSpec) -> Vocabulary | None:
        """Returns the model's vocabulary; None in simulation, which has no tokens."""
        from cbatch.model.checkpoint import Vocabulary

        return Vocabulary(spec)

    @abstractmethod
    def kv_tokens(self, parts: ExecutorParts, block_size: int) -> tuple[int, str]:
        """Returns the default size of the KV cache in tokens, and the reason for it."""

    def check_fits(self, parts: ExecutorParts, kv: KVSize) -> None:  # noqa: B027 - simulation loads nothing
        """Raises an error if the executor cannot be built, before weights are loaded."""

    @abstractmethod
    def executor(self, parts: ExecutorParts, kv: KVSize) -> Executor: ...

    def place(self, first_gpu: int) -> AbstractContextManager[Any]:
        """Returns a context in which the executor of a replica is built, on the GPUs from this one on."""
        return nullcontext()

    def meter(self, executors: Sequence[Any], now: Callable[[], float]) -> AbstractContextManager[Any]:
        """Returns a context that reads the energy of the executors' GPUs, an `EnergyMeter`; by default one without a value."""
        return nullcontext()

    def check_number(self, number: int) -> None:  # noqa: B027 - simulation has as many as it needs
        """Raises ConfigError if this machine has fewer GPUs, which pools need together."""

    @property
    def num_devices(self) -> int:
        """Returns the GPUs of all replicas; a CPU is one device."""
        return self.replicas * self.gpus_per_replica

    @property
    def gpus_per_replica(self) -> int:
        return self.tensor_parallel * self.pipeline_stages

    def facts(self, executors: Sequence[Any], cost: ProfileCost, asynchronous: bool) -> dict[str, Any]:
        """Returns facts about a run that has ended, from the executors of its replicas: which kernels ran, where predicted times come from."""
        return {"predictions": cost.provenance()}


def _router(key: str, router: Any) -> Router:
    """Returns the router of a name, or a router itself; raises ConfigError for anything else."""
    if not isinstance(router, str):
        if not callable(getattr(router, "choose", None)):
            raise ConfigError(f"{key}: {type(router).__name__} has no method choose(request, view)")
        chosen: Router = router
        return chosen
    if router not in ROUTERS:
        typed = "backend.router=my_module.MyRouter" if key == "backend.router" else "{_target_: my_module.MyRouter}"
        yours = f"for yours give the import path of its class, {typed}"
        raise ConfigError(f"{key}={router}: no such router; {nearest(router, ROUTERS)}; {yours}")
    return ROUTERS[router]()
