"""Settings of trials: a replication at a rate, or at a share of the highest rate that any policy can sustain."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from cbatch import ConfigError, Request
from cbatch.bounds import Bounds, minorants_of
from experiments.settings.assemble import Run, assemble
from experiments.settings.settings import Recipe, Settings
from experiments.trials.replications import Replication, Together, num_recorded
from experiments.workloads import TraceReplay, Workload


def replicate(settings: Settings, number: int, rate: float, num_requests: int) -> Settings:
    """Returns the settings of the run that serves one replication at one rate.

    Raises:
        ConfigError: the workload has a load, which gives it a rate already.
    """
    if (load := getattr(settings.workload, "load", None)) is not None:
        raise ConfigError(f"workload.load={load}: has no effect here, as the rate is varied; leave it out")
    return _with_workload(settings, Replication(settings.workload, number, rate, num_requests))


def bounds_together(settings: Settings, replications: int, num_requests: int) -> Bounds:
    """Returns the lower bounds of the requests of several replications.

    Raises:
        ConfigError: the bounds are not valid for this workload.
    """
    run = assemble(_with_workload(settings, Together(settings.workload, replications, num_requests)))
    return bounds_of(run)(run.requests)


def bounds_of(run: Run) -> Callable[[Sequence[Request]], Bounds]:
    """Returns what computes the lower bounds of some of a run's requests. Raises ConfigError where they are not valid."""
    lines, replicas = minorants_of(run.cost, run.limits), run.cost.topology.replicas

    def bounds(requests: Sequence[Request]) -> Bounds:
        return Bounds(requests, lines, run.limits, run.kv.num_tokens, replicas)

    bounds(run.requests)  # raises before anything is served
    return bounds


def at_load(settings: Settings) -> Settings:
    """Returns the settings of the replication that `workload.load` and `workload.seed` describe; without a load, the same settings.

    The rate is the load times the highest rate that any policy can sustain on the replications 0 to `workload.replications` - 1
    together: all policies, seeds and objectives have the same rate.

    Raises:
        ConfigError: the backend is not simulated, the workload has no rate, or too few requests for its replications.
    """
    load = getattr(settings.workload, "load", None)
    if load is None:
        return settings
    if not settings.backend.simulated:
        problem = f"workload.load={load}: is a share of a simulated rate, unknown for backend={settings.backend.name}"
        raise ConfigError(f"{problem}; give backend=sim, or a rate")
    replications = settings.workload.replications
    workload, number, num_requests = _replication_of(settings.workload)
    highest = _highest_rate(pickle.dumps(_without_policy(settings, workload)), replications, num_requests)
    replication: Any = Replication(workload, number, load * highest, num_requests)
    chosen = {**settings.chosen, "rate": f"{load * highest:.4g} (load {load:g} of at most {highest:.4g} requests/s)"}
    return replace(settings, workload=replication, chosen=chosen)


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


def _without_policy(settings: Settings, workload: Workload) -> Settings:
    """Returns settings that are equal for all policies and objectives."""
    workload, policy = replace(workload, slo=None, tiers=None), Recipe({"_target_": "policies.orca.Orca"})
    others: dict[str, Any] = {"composed": {}, "overrides": (), "choices": {}, "chosen": {}, "sweep": "", "output": None}
    return replace(settings, policy=policy, workload=workload, **others)


@lru_cache(maxsize=16)
def _highest_rate(pickled: bytes, replications: int, num_requests: int) -> float:
    """pickled: settings, which cannot be hashed."""
    return bounds_together(pickle.loads(pickled), replications, num_requests).rate


def _with_workload(settings: Settings, workload: Any) -> Settings:
    return replace(settings, workload=workload, timeline=False, decisions=False, stream="off")
