"""Resolves a workload's load: a share of the highest rate that any policy can sustain, by the lower bounds of its requests."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from cbatch import ConfigError, Limits, Request
from cbatch.bounds import Bounds, Minorant, findable_tokens, minorants_of
from cbatch.results.regret import BoundsOf
from cbatch.sim import ProfileCost
from experiments.settings.recipe import Recipe
from experiments.settings.settings import Composed, Settings
from experiments.setup.assemble import Run, assemble, with_workload
from experiments.trials.replications import Replication, Together, num_recorded
from experiments.workloads import TraceReplay, Workload


def bounds_of(run: Run) -> BoundsOf:
    """Returns a function that computes lower bounds for a subset of the run's requests. Raises ConfigError where none are valid."""
    if run.engine.arrivals.follow_ends:
        raise ConfigError("bounds=true: lower bounds hold for known requests, and here some follow the ends of others")
    if len(run.setups) > 1:
        problem = "lower bounds hold for equal replicas, not for backend.pools"
        raise ConfigError(f"bounds=true or workload.load: {problem}; leave one of them out")
    if run.engine.arrivals.iterations:  # arrivals depend on the schedule
        raise ConfigError("lower bounds: a request arrives by iteration; give requests with arrival times")
    cost, limits, kv = run.first.cost, run.first.limits, run.first.kv
    machine = pickle.dumps((cost.profile, cost.spec, cost.topology, cost.max_batch))
    lines = _minorants(machine, limits)
    found = findable_tokens(run.requests, kv.block_size) if run.settings.prefix_cache else None

    def bounds(requests: Sequence[Request]) -> Bounds:
        return Bounds(requests, lines, limits, kv.num_tokens, cost.topology.replicas, found)

    bounds(run.requests)  # raises before anything is served
    return bounds


@lru_cache(maxsize=8)
def _minorants(machine: bytes, limits: Limits) -> list[Minorant]:
    """Fits the minorants of a cost model, pickled as its arguments. It takes a second, and the runs of a sweep share machines."""
    return minorants_of(ProfileCost(*pickle.loads(machine)), limits)


def bounds_together(settings: Settings, replications: int, num_requests: int) -> Bounds:
    """Returns the lower bounds of the requests of several replications. Raises as `bounds_of`."""
    run = assemble(with_workload(settings, Together(settings.workload, replications, num_requests)))
    return bounds_of(run)(run.requests)


class Load(NamedTuple):
    """A resolved load: settings whose workload has the load's rate, the load, and this rate in requests per second; None without a load."""

    settings: Settings
    share: float | None = None
    rate: float | None = None


def resolve_load(settings: Settings) -> Load:
    """Returns settings with the replication that `workload.load` and `workload.seed` describe, and its rate.

    The rate is the load times the highest rate that any policy can sustain on the replications 0 to `workload.replications` - 1
    together: all policies, seeds and objectives have the same rate.
    Raises ConfigError: the backend is not simulated, the workload has no rate, or too few requests for its replications.
    """
    load = getattr(settings.workload, "load", None)
    if load is None:
        return Load(settings)
    if not settings.backend.simulated:
        problem = f"workload.load={load}: is a share of a simulated rate, unknown for backend={settings.backend.name}"
        raise ConfigError(f"{problem}; give backend=sim, or a rate")
    workload, number, num_requests = _replication_of(settings.workload)
    # equal for all policies and objectives
    others: dict[str, Any] = {"composed": Composed({}), "chosen": {}, "sweep": "", "output": None}
    others["policy"] = Recipe({"_target_": "policies.orca.Orca"})
    others["workload"] = replace(workload, slo=None, tiers=None)
    highest = _highest_rate(pickle.dumps(replace(settings, **others)), settings.workload.replications, num_requests)
    why = f"{load * highest:.4g} (load {load:g} of at most {highest:.4g} requests/s)"
    at_rate: Any = Replication(workload, number, load * highest, num_requests)
    resolved = replace(settings, workload=at_rate, chosen={**settings.chosen, "rate": why})
    return Load(resolved, load, load * highest)


def _replication_of(workload: Workload) -> tuple[Workload, int, int]:
    """Returns a workload without a load, which of its replications the settings describe, and their number of requests."""
    plain, pieces = replace(workload, load=None, replications=1), workload.replications
    if not isinstance(plain, TraceReplay):
        if plain.num_requests is None:
            raise ConfigError(f"workload.load={workload.load}: needs a number of requests; give workload.num_requests=")
        return replace(plain, seed=0), workload.seed, plain.num_requests
    whole = replace(plain, num_requests=None)
    recorded = num_recorded(whole) or 0
    if not recorded // pieces:
        raise ConfigError(f"workload.replications={pieces}: the trace has {recorded} requests; give fewer replications")
    num_requests = min(plain.num_requests or recorded, recorded // pieces)
    if pieces == 1:
        return whole, 0, num_requests
    if workload.seed >= pieces:
        problem = f"workload.seed={workload.seed}: selects one of workload.replications={pieces} pieces of the trace"
        raise ConfigError(f"{problem}; give at most {pieces - 1}")
    return replace(whole, seed=0), workload.seed, num_requests


@lru_cache(maxsize=16)
def _highest_rate(pickled: bytes, replications: int, num_requests: int) -> float:
    """Returns the highest rate that any policy can sustain. pickled: settings, which cannot be hashed."""
    return bounds_together(pickle.loads(pickled), replications, num_requests).rate
