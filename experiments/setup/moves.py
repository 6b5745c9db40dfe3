"""How requests move between the replicas of a run."""

from collections.abc import Sequence
from math import inf
from typing import Any

from cbatch import ConfigError
from cbatch.cluster import Moves, Role
from cbatch.sim.interpolation import PiecewiseLinear
from experiments.settings.backends import Real
from experiments.settings.settings import Settings
from experiments.setup.pools import Setup


def moves_of(settings: Settings, setups: Sequence[Setup], roles: Sequence[Role]) -> Moves | None:
    """Returns None if all requests stay where they are sent. Raises ConfigError for roles or pools between which nothing can be sent."""
    backend, router = settings.backend, settings.backend.router
    if {*roles} == {Role.BOTH} and (len(roles) == 1 or not getattr(router, "moves", False)):
        if backend.transfers != type(backend.transfers)():
            problem = "backend.transfers: has no effect where no request moves between replicas"
            raise ConfigError(f"{problem}; give backend.pools with the roles prefill and decode")
        return None
    if {*roles} != {Role.BOTH} and getattr(router, "divides", False):
        problem = f"backend.pools: router {type(router).__name__} divides the replicas itself"
        raise ConfigError(f"{problem}; leave out the roles, or give all pools role=both")
    for role in (Role.PREFILL, Role.DECODE):
        if not {role, Role.BOTH} & {*roles}:
            raise ConfigError(f"backend.pools: no replica can {role}; give a pool role={role}, or role=both")
    if settings.eviction is None:
        raise ConfigError("backend.pools: what is sent goes into the prefix cache; give prefix_cache=true")
    if len(sizes := {setup.kv.block_size for setup in setups}) > 1:
        stated = ", ".join(map(str, sorted(sizes)))
        raise ConfigError(f"backend.pools: blocks of {stated} tokens cannot be sent to each other; give one block_size")
    if isinstance(backend, Real):
        return _real(backend, setups)
    first: Any = setups[0]
    num_gpus = sum(setup.settings.backend.num_devices for setup in setups)
    block_size, leaves_node = first.kv.block_size, num_gpus > backend.gpus_per_node  # type: ignore[attr-defined]
    link, delay = first.cost.link(leaves_node, blocks=True), first.cost.delay(leaves_node)
    spec, transfers = settings.model, backend.transfers
    gpus = min(setup.settings.backend.gpus_per_replica for setup in setups)
    block_bytes = (spec.kv_bytes_per_token + settings.draft_kv_bytes * gpus) * block_size
    layers = spec.num_layers if transfers.layerwise else 1
    ahead = not leaves_node  # a network's adapters tell the host of an end, not the device
    return Moves(block_bytes, link, transfers.push, layers, transfers.lease or inf, transfers.fair, ahead, gpus, delay)


def _real(backend: Real, setups: Sequence[Setup]) -> Moves:
    transfers = backend.transfers
    if transfers.layerwise and any(setup.limits.max_drafts for setup in setups):
        problem = "backend.transfers.layerwise=true: drafts are made from tokens, which layers do not send"
        raise ConfigError(f"{problem}; give layerwise=false or drafter=none")
    backends = [setup.settings.backend for setup in setups]
    unlike = len({(each.tensor_parallel, each.pipeline_stages) for each in backends}) > 1
    if unlike or any(setup.kv.num_host_blocks for setup in setups):
        problem = "backend.pools: real blocks move between equal stages and ranks, without kv.host_tokens"
        remedy = "give all pools the same tensor_parallel and pipeline_stages, and kv.host_tokens=0"
        raise ConfigError(f"{problem}; {remedy}")
    link = PiecewiseLinear((1.0,), (0.0,))
    spec, block_size = setups[0].settings.model, setups[0].kv.block_size
    block_bytes, layers = spec.kv_bytes_per_token * block_size, spec.num_layers if transfers.layerwise else 1
    return Moves(block_bytes, link, transfers.push, layers, transfers.lease or inf, connect=backend.copies)
