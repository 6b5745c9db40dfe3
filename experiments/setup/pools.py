"""The setup of each pool of replicas: hardware, limits, KV cache and policy. All automatic choices are made, and noted, here."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from cbatch import BatchShape, CbatchError, ConfigError, KVSize, Limits, Policy, Server
from cbatch.drafts import NoDrafter
from cbatch.errors import ProfileError
from cbatch.facts import Facts
from cbatch.policy import check_policy
from cbatch.runtime.options import Options
from cbatch.sim import ProfileCost
from cbatch.sim.drafter import DraftPasses, SurvivalsDrafter
from experiments.check.scenario import predicts
from experiments.settings.backend import ExecutorParts, Pool
from experiments.settings.batch import LEAST_ITERATION
from experiments.settings.hardware import CPU, UnmeasuredCost
from experiments.settings.settings import Settings

LARGEST_ITERATION = 32768  # tokens that `max_tokens=auto` does not exceed for a whole batch of prompts


class Setup(NamedTuple):
    """A pool of equal replicas.

    name: of the pool; empty without pools. settings: the run's, with the pool's values in place.
    fits: whether the profile describes the hardware that the pool runs on.
    """

    name: str
    settings: Settings
    cost: ProfileCost
    limits: Limits
    kv: KVSize
    policy: Policy
    fits: bool

    @property
    def prices(self) -> list[float | None]:
        """Returns the dollars per hour of each replica's GPUs; None where they are unknown."""
        price, backend = self.settings.price, self.settings.backend
        if price is None and self.fits:
            price = self.cost.profile.price
        return [None if price is None else price * backend.num_devices / backend.replicas] * backend.replicas

    @property
    def peak(self) -> tuple[float, float] | str:
        """Returns the peak operations and bytes per second of a replica's GPUs, or why they are unknown."""
        profile, backend = self.cost.profile, self.settings.backend
        if CPU in (profile.name, backend.name):
            return "a CPU has no stated peak"
        if not self.fits:
            return f"hardware={profile.name} is not the GPU here"
        try:
            flops, moved = profile.peak_of(self.settings.model.dtype)
        except ProfileError as error:
            return str(error)
        return backend.gpus_per_replica * flops, backend.gpus_per_replica * moved

    @property
    def watts(self) -> list[tuple[float, ...] | None]:
        """Returns `Watts.of` each replica's GPUs in simulation; None where the power is unknown."""
        backend, watts = self.settings.backend, self.cost.profile.watts
        return [watts.of(backend.gpus_per_replica) if watts and backend.simulated else None] * backend.replicas

    @property
    def about(self) -> dict[str, Any]:
        """Returns what the replicas are."""
        backend, limits = self.settings.backend, {"batch": self.limits.max_batch, "tokens": self.limits.max_tokens}
        return {
            "policy": repr(self.settings.policy),
            "hardware": backend.hardware(self.cost.profile),
            **{key: getattr(backend, key) for key in ("replicas", "tensor_parallel", "pipeline_stages")},
            "limits": limits | {"kv_blocks": self.kv.num_blocks, "block_size": self.kv.block_size},
        }

    def servers(self, first_gpu: int) -> list[Server]:
        """Builds the servers of the replicas, on consecutive GPUs."""
        settings, backend, servers = self.settings, self.settings.backend, list[Server]()
        parts = _executor_parts(settings, self.cost, self.limits)
        drafter, loop = parts.options.drafter, (parts.asynchronous, settings.patience, settings.eviction)
        for replica in range(backend.replicas):
            with backend.place(first_gpu + replica * backend.gpus_per_replica):
                executor = backend.executor(parts, self.kv)
                if isinstance(drafter, SurvivalsDrafter):
                    executor.drafter = drafter.on(self.cost)  # type: ignore[attr-defined]
                servers.append(Server(executor, self.limits, self.cost, self.kv, *loop))
        return servers


def pools_of(settings: Settings) -> dict[str, Settings]:
    """Returns the settings of each pool by name; without pools, the run's settings under an empty name."""
    backend = settings.backend
    return {name: _in_pool(settings, pool) for name, pool in (backend.pools or {"": Pool()}).items()}


def _in_pool(settings: Settings, pool: Pool) -> Settings:
    """Returns the settings with the keys that a pool states."""
    stated = {key: value for key, value in vars(pool).items() if value is not None}
    policy = settings.policy.with_arguments(stated.pop("policy", {}))
    keys = "replicas", "tensor_parallel", "pipeline_stages", "role", "router"
    degrees = {key: stated.pop(key) for key in keys if key in stated}
    if settings.backend.pools:
        degrees = {"replicas": 1, **degrees}
    backend = replace(settings.backend, pools=None, **degrees)
    return replace(settings, backend=backend, policy=policy, **stated)


def check_profiles(settings: Settings) -> None:
    """Raises CbatchError if a simulated pool's hardware has no profile, or its model cannot be divided as wanted, which settings decide alone.

    Also if the policy predicts iterations on a CPU that was not measured.
    """
    for name, pool in pools_of(settings).items():
        with _of_pool(name):
            if pool.backend.simulated or pool.hardware == CPU:
                cost = pool.backend.cost(pool.hardware, pool.model, pool.batch)
                if isinstance(cost, UnmeasuredCost) and predicts(pool.policy):
                    cost.predict(BatchShape())  # raises


def check_policies(runs: Iterable[Settings]) -> None:
    """Builds every policy of several runs once, and drops it; the first run's is built next. Raises CbatchError as the constructor does."""
    pools = [(name, pool.policy) for run in runs for name, pool in pools_of(run).items()]
    recipes = {(repr(recipe.section), id(recipe.made)): (name, recipe) for name, recipe in pools}
    for name, recipe in [*recipes.values()][1:]:
        with _of_pool(name):
            recipe()


def set_up(name: str, settings: Settings, facts: Facts, chosen: dict[str, str]) -> Setup:
    """Returns the setup of a pool, and notes its automatic choices. Raises CbatchError: settings that cannot be used together."""
    with _of_pool(name):
        return _set_up(name, settings, facts, chosen)


@contextmanager
def _of_pool(name: str) -> Iterator[None]:
    """Names the pool in errors."""
    try:
        yield
    except CbatchError as error:
        error.args = (f"backend.pools.{name}: {error}",) if name else error.args
        raise


def include_drafts(cost: ProfileCost, settings: Settings, limits: Limits) -> None:
    """Adds to a cost model the rows of drafts, and the passes, keys and values of a draft model."""
    cost.max_rows = limits.max_rows
    cost.kv_bytes += settings.draft_kv_bytes
    if settings.drafter.model is not None:
        cost.of_draft_model = DraftPasses(cost, settings.drafter.model, limits.max_drafts).seconds


def _set_up(name: str, settings: Settings, facts: Facts, chosen: dict[str, str]) -> Setup:
    backend, spec, noted = settings.backend, settings.model, dict[str, str]()
    cost = backend.cost(settings.hardware, spec, settings.batch)
    profile = cost.profile
    here, there = backend.hardware(profile), profile.hardware
    if not (fits := here in (there, there.partition(",")[0])):
        noted["view.cost"] = f"{profile.name} (predictions are for {there}, this is {here})"
    policy = settings.policy()
    limits = _limits(settings, facts, backend.tile(profile), noted)
    check_policy(policy, limits)
    include_drafts(cost, settings, limits)
    parts = _executor_parts(settings, cost, limits)
    kv = _kv_size(settings, parts, noted)
    backend.check_fits(parts, kv)
    if backend.simulated and kv.num_host_blocks:
        cost.copy_seconds(0, 0, kv.block_size)  # raises ProfileError
    chosen |= {f"{name}.{key}" if name else key: why for key, why in noted.items()}
    return Setup(name, settings, cost, limits, kv, policy, fits)


def _limits(settings: Settings, facts: Facts, tile: int, chosen: dict[str, str]) -> Limits:
    """Returns the limits of an iteration. With max_tokens=auto, a whole batch of the longest prompts fits, and any single request."""
    positions, num_stages = settings.model.max_positions, settings.backend.pipeline_stages
    announced = min(facts.longest.max_tokens, positions)
    longest = positions if facts.is_open else announced
    batch, max_tokens = settings.batch, settings.max_tokens
    if max_tokens is None:
        prompts = batch * facts.longest_prompt.num_prompt_tokens
        max_tokens = max(LEAST_ITERATION, announced, min(prompts, LARGEST_ITERATION))
        chosen["max_tokens"] = str(max_tokens)
    if max_tokens < batch:
        problem = f"max_tokens={max_tokens} is below batch={batch}, a token per decode"
        raise ConfigError(f"{problem}; raise it or lower batch")
    if settings.chunk is not None and settings.chunk > max_tokens:
        raise ConfigError(f"chunk={settings.chunk} exceeds max_tokens={max_tokens}; lower chunk or raise max_tokens")
    if settings.max_running is not None and settings.max_running < batch:
        raise ConfigError(f"max_running={settings.max_running} is below batch={batch}; raise it or lower batch")
    drafter, running = settings.drafter, settings.max_running or 0
    named, is_drawn = f"drafter={settings.composed.choices.get('drafter')}", isinstance(drafter, SurvivalsDrafter)
    if drafter.needs_tokens and settings.backend.simulated:
        problem = "its drafts are tokens, which a simulation does not have"
        raise ConfigError(f"{named}: {problem}; give backend=cpu or cuda, or drafter=survivals")
    if is_drawn and not settings.backend.simulated:
        raise ConfigError(f"{named}: its drafts are no tokens; give backend=sim, or drafter=ngram")
    if not (drafter.max_drafts or isinstance(drafter, NoDrafter)):
        raise ConfigError(f"{named}: makes no drafts, as max_drafts is 0; set max_drafts in the class")
    if "drafting" in settings.policy.section and not drafter.max_drafts:
        remedy = "give drafter=glm_dspark in simulation, else drafter=ngram"
        raise ConfigError(f"drafting: {named} makes no drafts; {remedy}")
    return Limits(batch, max_tokens, longest, tile, (), num_stages, running, drafter.max_drafts)


def _executor_parts(settings: Settings, cost: ProfileCost, limits: Limits) -> ExecutorParts:
    runtime, drafter = settings.runtime, settings.drafter if limits.max_drafts else None
    options = Options(compiled=runtime.compile, graphs=runtime.graphs, times_copies=settings.timeline, drafter=drafter)
    return ExecutorParts(settings.model, cost, limits, options, runtime.asynchronous)


def _kv_size(settings: Settings, parts: ExecutorParts, chosen: dict[str, str]) -> KVSize:
    backend, block_size, kv_tokens = settings.backend, settings.block_size, settings.kv_tokens
    if block_size is None:
        block_size = backend.default_block_size(parts.cost.profile)
        chosen["block_size"] = str(block_size)
    if kv_tokens is None:
        kv_tokens, why = backend.kv_tokens(parts, block_size)
        chosen["kv_tokens"] = f"{kv_tokens} ({why})"
    elif kv_tokens % block_size:
        chosen["kv_tokens"] = f"{kv_tokens // block_size * block_size} (whole blocks of {block_size})"
    if kv_tokens < block_size:
        remedy = "raise kv_tokens" if settings.kv_tokens else "choose a smaller model, or lower block_size"
        raise ConfigError(f"kv_tokens={kv_tokens} is less than one block of block_size={block_size}; {remedy}")
    return KVSize(kv_tokens // block_size, block_size, settings.kv.host_tokens // block_size)
