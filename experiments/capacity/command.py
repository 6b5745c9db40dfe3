"""One capacity from plain settings: checks them, searches on all cores, writes the folder."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from cbatch import SLO, ConfigError
from cbatch.validation import Give, positive, whole
from experiments.capacity.definitions import Criterion, Rule
from experiments.capacity.estimate import Shares, alone, by_replication
from experiments.capacity.folder import CAPACITY, Simulations, open_simulations
from experiments.capacity.replications import (
    Outcome,
    highest_rate,
    natural_rate,
    num_recorded,
    queue_of,
    replicate,
    simulate,
)
from experiments.capacity.search import LEAST, Found, Wanted, shares_of
from experiments.capacity.search import Search as CapacitySearch
from experiments.serve import about_run
from experiments.settings.assemble import assemble
from experiments.settings.identity import identity
from experiments.settings.settings import Keys, Settings, read_as
from experiments.store.intervals import CONFIDENCE
from experiments.store.sources import sources_of

_REQUESTS, _PIECES = 2000, 20
FEWEST_REQUESTS, _MOST_REQUESTS = 20, 1_000_000
S = TypeVar("S", bound=Settings)
REQUESTS = f"auto, or a whole number from {FEWEST_REQUESTS} to {_MOST_REQUESTS}"

Share = Annotated[float, Field(gt=0, lt=1, strict=True), Give("a share between 0 and 1, as in 0.99")]


@dataclass(frozen=True, kw_only=True)
class SearchKeys(Keys):
    """The root keys with those of conf/capacity.yaml."""

    slo: SLO
    definition: Literal["joint", "sarathi_serve", "vidur", "distserve", "qoserve"]
    attainment: Share
    requests: Annotated[Literal["auto"] | Annotated[int, whole(FEWEST_REQUESTS, _MOST_REQUESTS)], Give(REQUESTS)]
    replications: Annotated[int, whole(3, 10_000)]
    accuracy: Annotated[float, positive("0.03 for ±3%")]
    cores: Annotated[Literal["auto"] | Annotated[int, whole(1, 1024)], Give("auto, or a whole number from 1 to 1024")]

    without_effect = (*Keys.without_effect, "cores")


@dataclass(frozen=True, kw_only=True)
class Search(SearchKeys, Settings):
    """The settings of a search."""


def measure(
    settings: Search, folder: Path, *, replace: bool = False, say: Callable[[str], None] = print, bar: bool = True
) -> dict[str, Any]:
    """Searches a capacity and writes its folder; returns what capacity.json holds. The arguments are those of `serve`.

    Raises:
        CbatchError: a setting that cannot be used, a failure of the policy, or a capacity that cannot be found.
    """
    began = time.perf_counter()
    rule = Rule(settings.definition, settings.slo, settings.attainment, bool(getattr(settings.workload, "tiers", None)))
    wanted = _wanted(settings, rule)
    if settings.bounds and settings.definition != "joint":
        problem = (
            f"definition={settings.definition} does not ask for all objectives of the same requests, as the bound does"
        )
        raise ConfigError(f"bounds=true: {problem}; give definition=joint, or bounds=false")
    natural_rate(settings.workload, wanted.requests)  # it has one
    run = assemble(replicate(settings, 0, 1.0, wanted.requests))
    code = sources_of(settings.composed)
    about = {**about_run(run), "identity": identity(settings), "slo": slo_name(settings), "code": code}
    with open_simulations(folder, settings, code) as simulations, _pool(settings.cores, bar) as pool:
        if simulations.resumed:
            say(f"{simulations.resumed} simulations of an earlier search are kept")
        work = partial(simulate, settings, rule)
        search = CapacitySearch(wanted, partial(_simulate, pool, work, simulations), say)
        found = search.run()
        about["wall_seconds"] = time.perf_counter() - began
        about["execution"]["iterations_outside_measured_range"] = sum(each.outside for each in search.outcomes)
        simulated = shares_of(search.outcomes, rule.criteria)
        summary = {"about": about, "capacity": figures(found, settings, [*simulations], simulated)}
        summary |= _details(found, rule.criteria)
        if settings.bounds:
            summary["regret"] = _regret(found, settings, rule)
        CAPACITY.write(folder, summary, settings.composed)
    return summary


def read_simulated(kind: type[S], keys: type[Keys], config: Mapping[str, Any], **given: Any) -> S:
    """Returns the settings of a command that simulates runs; the arguments are those of `read_as`.

    Raises:
        ConfigError: as `read_as`; a backend that is not simulated.
    """
    settings = read_as(kind, keys, config, **given)
    if not settings.backend.simulated:
        raise ConfigError(f"backend={settings.backend.name}: this command simulates; give backend=sim")
    return settings


def slo_name(settings: Settings) -> str:
    """Returns the objectives: the name of their file, and the keys that the command line changes."""
    changed = [override for override in settings.overrides if override.startswith("slo.")]
    name = settings.choices.get("slo", "none")
    return " ".join(changed if name == "none" and changed else [name, *changed])


def _wanted(keys: Search, rule: Rule) -> Wanted:
    definition, recorded = rule.definition, num_recorded(keys.workload)
    requests = keys.requests
    if requests == "auto":
        pieces = _REQUESTS if recorded is None else max(recorded // _PIECES, FEWEST_REQUESTS)
        requests = definition.requests or pieces
    least, warmup = min(LEAST, keys.replications), 0 if definition.all_count else None
    if recorded is not None and recorded // requests < least:
        problem = (
            f"a trace of {recorded} requests makes {recorded // requests} replications, at least {least} are needed"
        )
        fits, longer = recorded // least, f"a trace of {least * FEWEST_REQUESTS} requests or more"
        remedy = f"requests={fits}, or a longer trace" if fits >= FEWEST_REQUESTS else longer
        raise ConfigError(f"requests={requests}: {problem}; give {remedy}")
    grows = keys.requests == "auto" and warmup is None
    queue = queue_of(keys.workload)
    return Wanted(rule.criteria, requests, keys.replications, keys.accuracy, warmup, recorded, grows, queue)


@contextmanager
def _pool(wanted: int | str, alone: bool) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that simulate; None for one core: this process. alone: no launcher runs other searches beside this one."""
    cores = int(wanted) if wanted != "auto" else (os.cpu_count() or 1) if alone else 1
    if cores == 1:
        yield None
        return
    pool = ProcessPoolExecutor(cores)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _simulate(
    pool: ProcessPoolExecutor | None,
    work: Callable[[int, float, int, int], Outcome],
    simulations: Simulations,
    pairs: Sequence[tuple[int, float]],
    requests: int,
    warmup: int,
) -> list[Outcome]:
    """Simulates what has not been before."""
    keys = [(rate, number, requests, warmup) for number, rate in pairs]
    asked = [(number, rate, requests, warmup) for number, rate in pairs]
    new = [each for each, key in zip(asked, keys, strict=True) if simulations.find(key) is None]
    for outcome in (pool.map if pool else map)(work, *zip(*new, strict=True)) if new else ():
        simulations.add(outcome)
    return [outcome for outcome in map(simulations.find, keys) if outcome is not None]


def figures(found: Found, keys: Search, outcomes: Sequence[Outcome], simulated: Sequence[Shares]) -> dict[str, Any]:
    """What is reported of a capacity. outcomes: all that its folder holds, of the bracket too. simulated: by criterion, as they came."""
    return {
        "requests_per_second": found.rate,
        "low": found.low,
        "high": found.high,
        "confidence": CONFIDENCE,
        "replications": len(found.shares[0].good),
        "requests": found.requests,
        "warmup_requests": found.warmup,
        "definition": keys.definition,
        "attainment": keys.attainment,
        "slo": asdict(keys.slo),
        "one_alone": dict(alone(simulated)),
        "simulations": len(outcomes),
        "cpu_seconds": sum(outcome.seconds for outcome in outcomes),
    }


def _regret(found: Found, settings: Settings, rule: Rule) -> dict[str, float]:
    """The capacity and its interval over the highest rate that any policy can sustain."""
    bound = highest_rate(settings, rule.criteria[0].level, len(found.shares[0].good), found.requests)
    return {
        "capacity": found.rate / bound,
        "capacity_low": found.low / bound,
        "capacity_high": found.high / bound,
        "rate_bound": bound,
    }


def _details(found: Found, rules: Sequence[Criterion]) -> dict[str, Any]:
    """The shares at each rate, by criterion, and what a paired comparison needs."""
    curves = {rule.name: _curve(shares) for rule, shares in zip(rules, found.shares, strict=True)}
    return {"curves": curves, "by_replication": by_replication(found.shares)}


def _curve(shares: Shares) -> dict[str, Any]:
    low, high = shares.band()
    columns = {"rate": shares.rates, "share": shares.share(), "low": low, "high": high}
    return {
        "level": shares.level,
        "replications": shares.num_replications.tolist(),
        **{name: column.tolist() for name, column in columns.items()},
    }
