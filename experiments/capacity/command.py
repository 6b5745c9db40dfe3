"""Searches one capacity: checks the settings, simulates on all cores, writes the folder."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from cbatch import SLO, ConfigError
from cbatch.request_spec import NO_SLO
from cbatch.validation import Give, positive, whole
from experiments.capacity.control import draw_queue
from experiments.capacity.estimate import Capacity, Shares
from experiments.capacity.folder import RESULT, open_simulations
from experiments.capacity.search import LEAST, LEAST_PER_REQUEST, Goal, Search
from experiments.capacity.simulation import replicate, simulate
from experiments.report.intervals import CONFIDENCE
from experiments.serve import about_run, origin_of_run
from experiments.settings.settings import Keys, Settings
from experiments.setup.assemble import assemble
from experiments.store.claim import check_writable
from experiments.store.provenance import write_json
from experiments.trials.load import bounds_of, bounds_together
from experiments.trials.replications import check_random, natural_rate, num_recorded, over_sessions

_REQUESTS, _PIECES = 2000, 20
_FEWEST_REQUESTS, _MOST_REQUESTS = 20, 1_000_000
_NUM_REQUESTS = f"auto, or a whole number from {_FEWEST_REQUESTS} to {_MOST_REQUESTS}"

Share = Annotated[float, Field(gt=0, lt=1), Give("a share between 0 and 1, as in 0.99")]


@dataclass(frozen=True, kw_only=True)
class SimulatedKeys(Keys):
    """The root keys with the objectives of conf/slo, which are within the workload."""

    slo: SLO

    without_effect = (*Keys.without_effect, "slo")


@dataclass(frozen=True, kw_only=True)
class SimulatedSettings(SimulatedKeys, Settings):
    """The settings of a command that simulates runs. Raises ConfigError for a real backend, and if workload.slo contradicts slo."""

    def __post_init__(self) -> None:
        if not self.backend.simulated:
            raise ConfigError(f"backend={self.backend.name}: this command simulates; give backend=sim")
        keys = self.composed.keys
        if keys and _limits(keys["workload"].get("slo")) != _limits(keys["slo"]):
            raise ConfigError("workload.slo: follows slo here; give slo=NAME, or slo.ttft=SECONDS and so on")


def _limits(slo: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns the objectives that are set in a section, which may be None. An object's section also names its class."""
    return {name: limit for name, limit in (slo or {}).items() if limit is not None and name != "_target_"}


@dataclass(frozen=True, kw_only=True)
class SearchKeys(SimulatedKeys):
    """The root keys, and the keys of conf/capacity.yaml."""

    attainment: Share
    requests: Annotated[Literal["auto"] | Annotated[int, whole(_FEWEST_REQUESTS, _MOST_REQUESTS)], Give(_NUM_REQUESTS)]
    replications: Annotated[int, whole(3, 10_000)]
    accuracy: Annotated[float, positive("0.03 for ±3%")]
    cores: Annotated[Literal["auto"] | Annotated[int, whole(1, 1024)], Give("auto, or a whole number from 1 to 1024")]

    without_effect = (*Keys.without_effect, "cores")


@dataclass(frozen=True, kw_only=True)
class SearchSettings(SearchKeys, SimulatedSettings):
    """The settings of a search."""


def measure(
    settings: SearchSettings,
    folder: Path,
    *,
    replace: bool = False,
    log: Callable[[str], None] = print,
    bar: bool = True,
) -> dict[str, Any]:
    """Searches a capacity and writes its folder; returns the content of capacity.json. The arguments are as for `serve`.

    Raises CbatchError: a setting that cannot be used, a failure of the policy, or a capacity that cannot be found.
    """
    began = time.perf_counter()
    check_writable(folder)
    if settings.slo == NO_SLO and not getattr(settings.workload, "tiers", None):
        raise ConfigError("slo: no objective is set; give slo.ttft=SECONDS or slo.tbt=SECONDS")
    goal = _goal(settings)
    if not goal.per_session:
        natural_rate(settings.workload, goal.requests)  # raises if the workload has no rate
    if goal.recorded is None:
        check_random(settings.workload, goal.requests)
    run = assemble(replicate(settings, 0, 1.0, goal.requests))
    if settings.bounds:
        bounds_of(run)  # raises where they are not valid
    places = sum(setup.limits.max_batch * setup.settings.backend.replicas for setup in run.setups)
    if not goal.grows and not goal.per_session and goal.requests < (enough := LEAST_PER_REQUEST * places):
        most = f"{goal.requests // LEAST_PER_REQUEST} requests in the system near the capacity"
        log(f"requests={goal.requests}: allows at most {most}; {enough} would allow full batches")
    if goal.more:
        allowed = f"at most {int(goal.requests / goal.per_session)} sessions at a time"
        log(f"{goal.requests:,} requests in a replication allow {allowed}; {goal.more} allows more")
    origin, composed = origin_of_run(settings), settings.composed
    about = {**about_run(run), **origin, "slo": slo_text(composed.choices.get("slo", "none"), composed.overrides)}
    cores = settings.cores
    if cores == "auto":  # without a bar, a launcher runs other searches beside this one
        cores = (os.cpu_count() or 1) if bar else 1
    work, others = partial(simulate, settings), settings.other_code == "keep"
    shown: Any = {"other_code": others, "progress": settings.progress if bar else "off"}
    with open_simulations(folder, **origin, simulate=work, cores=cores, **shown) as simulations:
        if simulations.outcomes:
            log(f"{len(simulations.outcomes)} simulations of an earlier search are kept")
        search = Search(goal, simulations, log)
        capacity = search.run()
        about["wall_seconds"] = time.perf_counter() - began
        run.first.cost.num_outside = sum(outcome.outside for outcome in search.outcomes)
        run.first.cost.num_eager = sum(outcome.eager for outcome in search.outcomes)
        about["execution"] = run.about["execution"]
        figures = _figures(capacity, settings) | {"simulations": len(simulations.outcomes)}
        figures["cpu_seconds"] = sum(outcome.seconds for outcome in simulations.outcomes.values())
        curves, owed = {"attainment": _curve(capacity.shares)}, capacity.shares.by_replication()
        summary = {"about": about, "capacity": figures, "curves": curves, "by_replication": owed}
        if settings.bounds:
            summary["regret"] = _regret(capacity, settings)
        write_json(folder / RESULT, {**summary, "settings": dict(composed.keys)})  # last: says that it is complete
    return summary


def slo_text(name: str, overrides: Sequence[str]) -> str:
    """Returns the objectives: the name of their file, and the keys that the command line changes."""
    changed = [override for override in overrides if override.startswith("slo.")]
    return " ".join(changed if name == "none" and changed else [name, *changed])


def _goal_of_sessions(settings: SearchSettings) -> Goal:
    """Returns the goal of a search over concurrent sessions: at least 20 requests and two sessions for each."""
    workload: Any = settings.workload
    if given := [key for key in settings.composed.given() if f"{key}.".startswith("workload.arrivals.")]:
        raise ConfigError(f"{given[0]}: has no effect here, as the number of sessions is varied; leave it out")
    turns, is_whole = workload.requests(None), workload.num_requests is None
    if is_whole and settings.requests != "auto":
        raise ConfigError(f"requests={settings.requests}: recorded sessions are whole; give workload.num_sessions=")
    usual = len(turns) if is_whole else _REQUESTS
    requests = usual if settings.requests == "auto" else settings.requests
    per_session = max(20.0, 2 * len(turns) / len({turn.session for turn in turns}))
    target = settings.attainment, requests, settings.replications, settings.accuracy
    grows = settings.requests == "auto" and not is_whole
    more = "" if grows else "a larger workload.num_sessions=" if is_whole else f"requests={2 * requests}"
    return Goal(*target, grows=grows, per_session=per_session, first=workload.sessions or 8, more=more)


def _goal(settings: SearchSettings) -> Goal:
    if over_sessions(settings.workload):
        return _goal_of_sessions(settings)
    recorded = num_recorded(settings.workload)
    usual = _REQUESTS if recorded is None else max(recorded // _PIECES, _FEWEST_REQUESTS)
    requests = usual if settings.requests == "auto" else settings.requests
    least = min(LEAST, settings.replications)
    if recorded is not None and recorded // requests < least:
        held = recorded // requests
        problem = f"a trace of {recorded} requests makes {held} replications, at least {least} are needed"
        fits, longer = recorded // least, f"a trace of {least * _FEWEST_REQUESTS} requests or more"
        remedy = f"requests={fits}, or a longer trace" if fits >= _FEWEST_REQUESTS else longer
        raise ConfigError(f"requests={requests}: {problem}; give {remedy}")
    grows, queue = settings.requests == "auto", draw_queue(settings.workload)
    return Goal(settings.attainment, requests, settings.replications, settings.accuracy, recorded, grows, queue)


def _figures(capacity: Capacity, settings: SearchSettings) -> dict[str, Any]:
    """Returns the capacity with the settings that it depends on."""
    return {
        "sessions" if over_sessions(settings.workload) else "requests_per_second": capacity.rate,
        "low": capacity.low,
        "high": capacity.high,
        "confidence": CONFIDENCE,
        "replications": len(capacity.shares.good),
        "requests": capacity.requests,
        "warmup_requests": capacity.warmup,
        "attainment": settings.attainment,
        "slo": asdict(settings.slo),
    }


def _regret(capacity: Capacity, settings: SearchSettings) -> dict[str, float]:
    """Returns the capacity and its interval over the highest rate that any policy can sustain."""
    replications = len(capacity.shares.good)
    bound = bounds_together(settings, replications, capacity.requests).rate_attained(settings.attainment)
    ends = {"capacity": capacity.rate, "capacity_low": capacity.low, "capacity_high": capacity.high}
    return {**{name: rate / bound for name, rate in ends.items()}, "rate_bound": bound}


def _curve(shares: Shares) -> dict[str, Any]:
    low, high = shares.band()
    columns = {"replications": shares.num_replications, "rate": shares.rates, "share": shares.share()}
    columns |= {"low": low, "high": high}
    return {"level": shares.level, **{name: column.tolist() for name, column in columns.items()}}
