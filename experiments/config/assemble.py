"""From a resolved configuration to an engine with its requests submitted: every choice is made, and said, here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from cbatch import ConfigError, Engine, Limits, Policy, Request
from cbatch.checkpoint import spec_from_checkpoint
from cbatch.engine import check_policy
from cbatch.model import ModelSpec
from cbatch.sim.cluster import Cluster, make_router
from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile import Profile
from cbatch.sim.profile_file import load_profile
from cbatch.sim.topology import Topology
from experiments.config.backends import Auto, Backend, Runtime
from experiments.config.construct import construct
from experiments.config.settings import Settings, read_settings
from experiments.progress import loading_bars
from experiments.workloads import Workload

LARGEST_ITERATION = 32768
"""Tokens above which `max_tokens=auto` does not go for the sake of a whole batch of prompts."""


@dataclass(eq=False)
class Run:
    """Everything that one run needs.

    chosen: what `auto` settled on, and why, by key; it is printed and stored with the results.
    """

    settings: Settings
    backend: Backend
    cost: ProfileCost
    spec: ModelSpec
    limits: Limits
    engine: Engine | Cluster
    requests: list[Request]
    chosen: dict[str, str] = field(default_factory=dict)


def assemble(config: Mapping[str, Any]) -> Run:
    """Build a run. Nothing is written, and no weights are loaded before all settings are checked.

    config: the composed configuration as plain dictionaries, interpolations resolved.

    Raises:
        CbatchError: a setting, workload, policy, model or profile that cannot be used; the message says which and why.
    """
    settings = read_settings(config)
    chosen: dict[str, str] = {}
    backend = _backend(config, chosen)
    runtime: Runtime = construct("runtime", config["runtime"], needs=("asynchronous", "graphs", "compile", "check"))
    runtime = replace(runtime, times_copies=settings.timeline)
    spec = make_model(config, chosen)
    profile = load_profile(settings.hardware)
    cost = backend.cost(profile, spec, settings.batch)
    workload: Workload = construct("workload", config["workload"], needs=("requests",))
    policy = make_policy(config, settings, chosen)

    requests = workload.requests(backend.vocabulary(spec))
    _check_metrics(settings, len(requests))
    limits = _limits(settings, requests, spec, backend.tile(profile), cost.topology, chosen)
    check_policy(policy, limits)
    num_blocks, block_size = _kv_blocks(settings, backend, spec, profile, limits, chosen)
    if not backend.simulated:
        loading_bars(settings.progress)
    engines = [
        Engine(
            policy if replica == 0 else make_policy(config, settings, chosen),
            backend.executor(spec, cost, limits, runtime, num_blocks, block_size),
            limits,
            cost,
            num_blocks=num_blocks,
            block_size=block_size,
            asynchronous=runtime.asynchronous,
        )
        for replica in range(cost.topology.replicas)
    ]
    engine = engines[0] if len(engines) == 1 else Cluster(engines, make_router(config["backend"]["router"]))
    run = Run(settings, backend, cost, spec, limits, engine, requests, chosen)
    with closed_on_error(run):
        engine.submit(requests)
    return run


@contextmanager
def closed_on_error(run: Run) -> Iterator[None]:
    """Give the executor's threads and memory back if something fails, so that the error is the end of it."""
    try:
        yield
    except BaseException:
        run.engine.executor.close()
        raise


def _backend(config: Mapping[str, Any], chosen: dict[str, str]) -> Backend:
    backend: Backend | Auto = construct("backend", config["backend"], needs=("name",))
    if isinstance(backend, Auto):
        backend, why = backend.choose()
        chosen["backend"] = f"{backend.name} ({why})"
    return backend


def make_model(config: Mapping[str, Any], chosen: dict[str, str]) -> ModelSpec:
    spec: ModelSpec = construct("model", config["model"], needs=ModelSpec.__slots__)
    if spec.path is not None:
        spec = replace(spec_from_checkpoint(spec.path), seed=spec.seed)
        chosen["model"] = f"{spec.name} (of model.path)"
    return spec


def make_policy(config: Mapping[str, Any], settings: Settings, chosen: dict[str, str]) -> Policy:
    """The policy; with chunk=auto, its chunks are sized by `PDAware` unless the selector takes no chunk anyway."""
    if not isinstance(config["policy"], Mapping):
        return construct("policy", config["policy"])  # type: ignore[no-any-return] # raises: it is no section
    section = dict(config["policy"])
    chunking = section.get("chunking")
    if settings.chunk is None and isinstance(chunking, Mapping) and "chunk" in chunking:
        section["chunking"] = {"_target_": "policies.chunking.PDAware"}
        chosen["chunking"] = "pd_aware (chunk=auto)"
    policy: Policy = construct("policy", section)
    if not callable(getattr(policy, "plan", None)):
        raise ConfigError(f"policy._target_={section['_target_']} has no method plan(view); see cbatch.Policy")
    return policy


def _check_metrics(settings: Settings, num_requests: int) -> None:
    metrics = settings.metrics
    if metrics.warmup_requests + metrics.drain_requests >= num_requests:
        raise ConfigError(
            f"metrics.warmup_requests={metrics.warmup_requests} and metrics.drain_requests="
            f"{metrics.drain_requests} leave none of {num_requests} requests; lower them"
        )


def _limits(
    settings: Settings,
    requests: Sequence[Request],
    spec: ModelSpec,
    tile: int,
    topology: Topology,
    chosen: dict[str, str],
) -> Limits:
    """Limits of an iteration: as large as a whole batch of the longest prompts, and always as the longest request."""
    longest = min(max(request.max_tokens for request in requests), spec.max_positions)
    max_tokens = settings.max_tokens
    if max_tokens is None:
        prompts = settings.batch * max(request.num_prompt_tokens for request in requests)
        max_tokens = max(8192, longest, min(prompts, LARGEST_ITERATION))
        chosen["max_tokens"] = str(max_tokens)
    if max_tokens < settings.batch:
        raise ConfigError(
            f"max_tokens={max_tokens} is below batch={settings.batch}: a decode takes a token each; "
            "raise max_tokens or lower batch"
        )
    if settings.chunk is not None and settings.chunk > max_tokens:
        raise ConfigError(
            f"chunk={settings.chunk} exceeds max_tokens={max_tokens} of an iteration; lower chunk or raise max_tokens"
        )
    return Limits(settings.batch, max_tokens, longest, tile=tile, num_stages=topology.pipeline_stages)


def _kv_blocks(
    settings: Settings, backend: Backend, spec: ModelSpec, profile: Profile, limits: Limits, chosen: dict[str, str]
) -> tuple[int, int]:
    """The KV cache: blocks, and tokens a block."""
    block_size = settings.block_size
    if block_size is None:
        block_size = backend.block_size
        chosen["block_size"] = str(block_size)
    kv_tokens = settings.kv_tokens
    if kv_tokens is None:
        kv_tokens, why = backend.kv_tokens(spec, profile, limits, block_size)
        chosen["kv_tokens"] = f"{kv_tokens} ({why})"
    if kv_tokens < block_size:
        raise ConfigError(f"kv_tokens={kv_tokens} is less than one block of block_size={block_size}; raise kv_tokens")
    return kv_tokens // block_size, block_size
