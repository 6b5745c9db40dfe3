"""Simulates replications, and counts the requests that meet all of their objectives: a share, whose mean has an interval."""

import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from operator import attrgetter
from typing import NamedTuple

from cbatch import ConfigError, Request
from cbatch.request import spec_of
from cbatch.request_spec import NO_SLO
from cbatch.results.attainment import judge
from cbatch.results.metrics import Served, collect_served
from cbatch.results.sessions import last_begin
from cbatch.sim.drafter import SurvivalsDrafter
from experiments.settings.settings import Settings
from experiments.setup.assemble import assemble, with_workload
from experiments.trials.replications import Replication, at_a_time, first_arrivals, over_sessions


def count_attained(requests: Sequence[Request], served: Served) -> tuple[int, int]:
    """Returns how many requests meet all of their objectives ttft, tbt and total, and how many have any."""
    requests = [request for request in requests if request.slo != NO_SLO]
    return int(judge(requests, served).met.all(axis=0).sum()), len(requests)


def _mean_pause(requests: Sequence[Request]) -> float:
    """Returns the mean seconds between the first arrival of a request's conversation and its own: load builds up meanwhile."""
    begins = first_arrivals(map(spec_of, requests))[1]
    return sum(request.arrival_time - begin for request, begin in zip(requests, begins, strict=True)) / len(requests)


class Outcome(NamedTuple):
    """The figures of one simulation.

    rate: requests per second, or the number of concurrent sessions. good, total: requests that meet their objectives, and all.
    in_system: mean number of requests and of pausing conversations. seconds: CPU time.
    outside: iterations outside the measured range. eager: those with prompts that fit no captured graph.
    """

    rate: float
    replication: int
    requests: int
    warmup: int
    good: int
    total: int
    in_system: float
    seconds: float
    outside: int = 0
    eager: int = 0


def replicate(settings: Settings, number: int, rate: float, num_requests: int) -> Settings:
    """Returns the settings of the run that serves one replication at one rate, or with this number of concurrent sessions.

    Raises ConfigError: the workload has a load, which gives it a rate already.
    """
    if (load := getattr(settings.workload, "load", None)) is not None:
        raise ConfigError(f"workload.load={load}: has no effect here, as the rate is varied; leave it out")
    if isinstance(drafter := settings.drafter, SurvivalsDrafter):
        settings = replace(settings, drafter=drafter.of_replication(number))
    if over_sessions(settings.workload):
        return with_workload(settings, at_a_time(settings.workload, number, round(rate), num_requests))
    return with_workload(settings, Replication(settings.workload, number, rate, num_requests))


def simulate(settings: Settings, number: int, rate: float, num_requests: int, warmup: int) -> Outcome:
    """Serves one replication at one rate, or with one number of sessions, to its end.

    warmup: number of requests at the beginning that do not count. As many at the end do not count either; with sessions, those
        that arrive after the last session has begun.
    """
    began = time.process_time()
    run = assemble(replicate(settings, number, rate, num_requests))
    record = run.engine.run()
    served = collect_served(record)
    if over_sessions(settings.workload):
        counted: Sequence[Request] = _while_full(record.requests, run.facts.num_warming + warmup)
        in_system = rate
    else:
        counted = run.requests[warmup : num_requests - warmup]
        seconds_in_system = float(served.end_to_end.mean()) + _mean_pause(run.requests) if len(served.id) else inf
        in_system = rate * seconds_in_system
    counts, seconds = count_attained(counted, served), time.process_time() - began
    return Outcome(rate, number, num_requests, warmup, *counts, in_system, seconds, *run.num_outside_and_eager)


def _while_full(requests: Sequence[Request], warmup: int) -> list[Request]:
    """Returns the requests of sessions that arrive after the first `warmup`, and before sessions that end have no successor."""
    latest_begin = last_begin(requests)
    in_order = sorted(requests, key=attrgetter("arrival_time", "id"))[warmup:]
    return [request for request in in_order if request.arrival_time <= latest_begin]
