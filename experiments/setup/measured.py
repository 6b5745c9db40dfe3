"""The figures that settings rule out, so that a command that asks for one by its key is refused before the first run."""

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from cbatch import SLO, ConfigError
from cbatch.request_spec import NO_SLO
from cbatch.sim import Profile
from experiments.report.headings import check_figure
from experiments.settings.hardware import CPU
from experiments.settings.settings import Settings
from experiments.setup.pools import pools_of
from experiments.trials.replications import over_sessions
from experiments.workloads import DailyArrivals, GammaArrivals

Condition = Callable[[Settings], object]


def _stated(by: Callable[[Any], object]) -> Condition:
    """Returns the condition that requests state something. by: whether a workload's do; those of a file, or of a user's class, may."""

    def may(run: Settings) -> object:
        kind = type(run.workload)
        return not kind.__module__.startswith("experiments.") or hasattr(run.workload, "path") or by(run.workload)

    return may


def _has_objective(workload: Any, names: Collection[str] = SLO.__slots__) -> bool:
    slos = [workload.slo, *(tier.slo for tier in (workload.tiers or {}).values())]
    return any(getattr(slo, name, None) for slo in slos for name in names)


def _is_queued(workload: Any) -> bool:
    drawn = isinstance(getattr(workload, "arrivals", None), GammaArrivals | DailyArrivals)
    return not drawn and not hasattr(workload, "clients")


def _of_profiles(holds: Callable[[Settings, Profile], object]) -> Condition:
    """Returns the condition that something holds of each pool and its profile."""

    def hold(run: Settings) -> bool:
        costs = ((pool, pool.backend.cost(pool.hardware, pool.model, pool.batch)) for pool in pools_of(run).values())
        return all(holds(pool, cost.profile) for pool, cost in costs)

    return hold


def _moves(run: Settings) -> bool:
    roles = {pool.role or "both" for pool in (run.backend.pools or {}).values()}
    return not roles <= {"both"} or bool(getattr(run.backend.router, "moves", False))


_any_objective = _stated(_has_objective)

_RULES: Sequence[tuple[str, Condition, str]] = (
    ("regret", lambda run: run.bounds, "bounds=true"),
    (r"prefix_cache|sessions\.cache_lost_share", lambda run: run.prefix_cache, "prefix_cache=true"),
    (r"prefix_cache\.host", lambda run: run.kv.host_tokens, "kv.host_tokens=1000000"),
    ("drafts", lambda run: run.drafter.max_drafts, "drafter=NAME"),
    ("goodput", lambda run: run.metrics.objectives != NO_SLO or _any_objective(run), "workload.slo={ttft:1}"),
    ("attainment", _any_objective, "workload.slo={ttft:1}"),
    *(
        (rf"attainment\..*\b{name}_share", _stated(partial(_has_objective, names=[name])), f"workload.slo={{{name}:1}}")
        for name in SLO.__slots__
    ),
    (r"(attainment|prefix_cache)\.tiers", _stated(attrgetter("tiers")), "workload.tiers={NAME:{share:1}}"),
    (r"service|((attainment|prefix_cache)\.)?clients", _stated(lambda of: hasattr(of, "clients")), "workload=clients"),
    ("sessions", _stated(over_sessions), "workload=chat"),
    (r"run\.tail_share", _stated(_is_queued), "workload=queued"),
    (r"run\.tail_share", lambda run: run.backend.replicas == 1, "backend.replicas=1"),
    (r"(pools\..+\.)?cost", _of_profiles(lambda pool, of: {pool.price, of.price} != {None}), "price=5"),
    ("mfu|mbu|energy", lambda run: run.backend.name != CPU, "backend=sim"),
    ("mfu|mbu", _of_profiles(lambda _, of: of.name != CPU), "hardware=h200"),
    ("energy", _of_profiles(lambda pool, of: of.watts or not pool.backend.simulated), "hardware=h200"),
    (r"energy\.at_limit_share", lambda run: run.backend.simulated, "backend=sim"),
    ("replicas", lambda run: run.backend.replicas > 1, "backend.replicas=2"),
    (r"replicas\.(seconds|mean|most|lives)", lambda run: run.autoscale, "autoscale=NAME"),
    (r"pools\.[^.]+\.(mean|most)_replicas", lambda run: run.autoscale, "autoscale=NAME"),
    ("pools", lambda run: len(run.backend.pools or ()) > 1, "backend.pools={...} with several pools"),
    (r"transfers|run\.recomputed_after_\w+", _moves, "backend.pools={...} with roles"),
)
"""The first parts of figures' keys, whether a run can have these figures by its settings, and a setting with which it can."""


def check_measured(metrics: Collection[str], runs: Sequence[Settings]) -> None:
    """Raises ConfigError as `check_figure`, and for a figure that the settings of some runs rule out. metrics: figures by key."""
    for key in metrics:
        check_figure(f"metric={key}")
        for can, setting in ((can, setting) for first, can, setting in _RULES if re.match(rf"({first})(\.|$)", key)):
            named: dict[bool, list[set[str]]] = {True: [], False: []}
            for run in runs:
                named[bool(can(run))].append({*run.composed.named})
            if lacking := named[False]:
                what = set.intersection(*lacking).difference(*named[True]) or lacking[0]
                who = f"runs with {' '.join(sorted(what))} do not measure it" if named[True] else "no run measures it"
                raise ConfigError(f"metric={key}: {who}; give {setting}, or another figure")
