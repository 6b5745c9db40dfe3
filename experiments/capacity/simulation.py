"""Simulates replications, and counts whether the server copes: by the joint attainment of objectives, or by a published rule.

Every rule is a conjunction of shares. "P99 of the time between tokens is at most 0.1 s" becomes "at least 99% of the gaps are at most
0.1 s": a share has a mean over replications, and so an interval. The capacity is the least over the shares.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from cbatch import SLO, ConfigError, Request
from cbatch.request_spec import NO_SLO
from cbatch.results.attainment import judge
from cbatch.results.metrics import Served, collect_served
from cbatch.results.summary import hits_of
from experiments.settings.assemble import assemble, with_workload
from experiments.settings.settings import Settings
from experiments.trials.replications import Replication

Count = tuple[int, int]
"""(number that is good, number of all)."""


class Criterion(NamedTuple):
    """A share that must be at least `level`. good: called with the counted requests, and the served ones among them."""

    name: str
    level: float
    good: Callable[[Sequence[Request], Served], Count]


class Definition(NamedTuple):
    """A rule.

    criteria: from the objectives and the wanted attainment. needs: objectives without which the rule is undefined.
    requests: per replication, as published; None: enough for the warm-up.
    all_count: the first and last requests count, as in the published searches.
    """

    criteria: Callable[[SLO, float], list[Criterion]]
    needs: Sequence[str] = ()
    requests: int | None = None
    all_count: bool = True


def _attainment(which: Sequence[bool], level: float) -> Criterion:
    """Returns the share of requests that meet all of their objectives ttft, tbt and total that `which` selects."""

    def count(requests: Sequence[Request], served: Served) -> Count:
        requests = [request for request in requests if request.slo != NO_SLO]
        met = judge(requests, served).met[[*which, True]]
        return int(met.all(axis=0).sum()), len(requests)

    return Criterion("attainment", level, count)


def _share(name: str, level: float, values: Callable[[Served], Any], limit: float | None) -> Criterion:
    """Returns the share of requests whose value is at most `limit`; a request without a value has none."""
    return Criterion(name, level, lambda requests, served: (int((values(served) <= limit).sum()), len(requests)))


def _gaps(level: float, limit: Any) -> Criterion:
    """Returns the share of gaps between tokens of at most `limit`."""

    def count(_: Sequence[Request], served: Served) -> Count:
        gaps, _times = served.gaps()
        return int((gaps <= limit).sum()), len(gaps)

    return Criterion("tbt", level, count)


_delays = partial(_share, "scheduling delay", values=attrgetter("scheduling_delay"))

DEFINITIONS = {
    "joint": Definition(lambda slo, level: [_attainment((True, True, True), level)], all_count=False),
    # branch osdi-sarathi-serve: P50 of the scheduling delay, P99 of all gaps
    "sarathi_serve": Definition(lambda slo, _: [_delays(0.5, limit=2.0), _gaps(0.99, slo.tbt)], ("tbt",), 2048),
    "vidur": Definition(lambda slo, _: [_delays(0.99, limit=5.0)], (), 16_000),  # of its config_optimizer
    # P90 of TTFT and P90 of TPOT, separately; the objective `tbt` is the TPOT
    "distserve": Definition(
        lambda slo, _: [
            _share("ttft", 0.9, attrgetter("ttft"), slo.ttft),
            _share("tpot", 0.9, lambda served: np.nan_to_num(served.tpot), slo.tbt),
        ],
        ("ttft", "tbt"),
        1000,
    ),
    "qoserve": Definition(lambda slo, _: [_attainment((True, False, True), 0.99)], (), 42_000),  # first, last token
}
"""The default, and the rules of published searches (docs/capacity.md), by name."""


@dataclass(frozen=True)
class Rule:
    """A definition with its objectives.

    attainment: the share for definition=joint. tiers: whether the workload's service classes have objectives of their own.
    Raises ConfigError: an objective that the definition needs is not set.
    """

    name: str
    slo: SLO
    attainment: float
    tiers: bool = False

    def __post_init__(self) -> None:
        for key in self.definition.needs:
            if getattr(self.slo, key) is None:
                raise ConfigError(f"definition={self.name}: needs an objective, give slo.{key}=SECONDS")
        if self.name in ("joint", "qoserve") and self.slo == NO_SLO and not self.tiers:
            raise ConfigError(f"definition={self.name}: no objective is set; give slo.ttft=SECONDS or slo.tbt=SECONDS")

    @property
    def definition(self) -> Definition:
        return DEFINITIONS[self.name]

    @property
    def criteria(self) -> list[Criterion]:
        return self.definition.criteria(self.slo, self.attainment)


def select(served: Served, first: int, end: int) -> Served:
    """Returns the served requests with ids from `first` to before `end`."""
    rows = (served.id >= first) & (served.id < end)
    tokens = (served.token_ids >= first) & (served.token_ids < end)
    columns: dict[str, Any] = {
        field.name: getattr(served, field.name)[tokens if field.name.startswith("token_") else rows]
        for field in fields(served)
    }
    return replace(served, **columns)


class Outcome(NamedTuple):
    """The figures of one simulation.

    counts: of each criterion. in_system: mean number of requests. seconds: of CPU time. outside: iterations outside the
    measured range. hit_share: of prompt tokens found in the prefix cache; NaN without one.
    """

    rate: float
    replication: int
    requests: int
    warmup: int
    counts: tuple[Count, ...]
    in_system: float
    seconds: float
    outside: int = 0
    hit_share: float = math.nan


def replicate(settings: Settings, number: int, rate: float, num_requests: int) -> Settings:
    """Returns the settings of the run that serves one replication at one rate.

    Raises ConfigError: the workload has a load, which gives it a rate already.
    """
    if (load := getattr(settings.workload, "load", None)) is not None:
        raise ConfigError(f"workload.load={load}: has no effect here, as the rate is varied; leave it out")
    return with_workload(settings, Replication(settings.workload, number, rate, num_requests))


def simulate(settings: Settings, rule: Rule, number: int, rate: float, num_requests: int, warmup: int) -> Outcome:
    """Serves one replication at one rate to its end.

    warmup: requests at the beginning that do not count, and as many at the end.
    """
    began = time.process_time()
    run = assemble(replicate(settings, number, rate, num_requests))
    record = run.engine.run()
    served, hits = collect_served(record), hits_of(record.requests) if settings.prefix_cache else {}
    first, end = warmup, num_requests - warmup
    part = select(served, first, end)
    counts = tuple(criterion.good(run.requests[first:end], part) for criterion in rule.criteria)
    in_system = rate * float(served.end_to_end.mean()) if len(served.id) else float("inf")
    seconds = time.process_time() - began
    found = hits.get("hit_share", math.nan)
    return Outcome(rate, number, num_requests, warmup, counts, in_system, seconds, run.cost.num_outside, found)
