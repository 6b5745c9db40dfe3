"""One simulation of a search: a replication at a rate, and how many of its requests meet each criterion."""

import time
from typing import NamedTuple

from cbatch import ConfigError
from cbatch.results.metrics import collect_served
from experiments.capacity.definitions import Count, Rule, select
from experiments.settings.assemble import assemble, with_workload
from experiments.settings.settings import Settings
from experiments.trials.replications import Replication


class Outcome(NamedTuple):
    """The figures of one simulation.

    counts: of each criterion. in_system: mean number of requests. seconds: of CPU time. outside: iterations outside the
    measured range.
    """

    rate: float
    replication: int
    requests: int
    warmup: int
    counts: tuple[Count, ...]
    in_system: float
    seconds: float
    outside: int = 0


def replicate(settings: Settings, number: int, rate: float, num_requests: int) -> Settings:
    """Returns the settings of the run that serves one replication at one rate.

    Raises:
        ConfigError: the workload has a load, which gives it a rate already.
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
    served = collect_served(run.engine.run())
    first, end = warmup, num_requests - warmup
    part = select(served, first, end)
    counts = tuple(criterion.good(run.requests[first:end], part) for criterion in rule.criteria)
    in_system = rate * float(served.end_to_end.mean()) if len(served.id) else float("inf")
    seconds = time.process_time() - began
    return Outcome(rate, number, num_requests, warmup, counts, in_system, seconds, run.cost.num_outside)
