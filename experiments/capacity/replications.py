"""Replications of a workload at any rate, on common random numbers: a rate only stretches the time between arrivals.

Replication k of a random workload has seed + k: arrivals, lengths and classes of its own, the same at every rate and under
every policy. Of a recorded trace it is the k-th piece, as there is nothing to draw. Each piece is stretched to the rate on its own:
the drift of the rate over hours is taken out; bursts, lengths and their order stay as recorded.
"""

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from cbatch import ConfigError, Request, RequestSpec
from cbatch.request import spec_of
from cbatch.results.metrics import collect_served
from experiments.capacity.control import Draw
from experiments.capacity.definitions import Count, Rule, select
from experiments.capacity.estimate import Floats
from experiments.serve import bounds_of
from experiments.settings.assemble import assemble
from experiments.settings.settings import Settings
from experiments.workloads import OpenLoop, TraceReplay, Vocabulary, Workload

_NUM_FOR_RATE = 4  # replications whose mean rate is that of a random workload


class Outcome(NamedTuple):
    """One simulation.

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


@dataclass(frozen=True)
class Replication:
    """A workload, for `assemble`: replication `number` of another.

    rate: mean requests per second. num_requests: its length.
    """

    workload: Workload
    number: int
    rate: float
    num_requests: int

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        pickled = pickle.dumps(self.workload)
        specs = _replication(pickled, self.number, self.num_requests)
        recorded = isinstance(self.workload, TraceReplay)
        natural = _mean_rate([specs], pickled) if recorded else _natural_rate(pickled, self.num_requests)
        factor, begin = natural / self.rate, specs[0].arrival_time
        return [
            Request.from_spec(replace(spec, id=id_, arrival_time=(spec.arrival_time - begin) * factor))
            for id_, spec in enumerate(specs)
        ]


@dataclass(frozen=True)
class Together:
    """A workload, for `assemble`: the requests of several replications at one request per second each."""

    workload: Workload
    replications: int
    num_requests: int

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        pickled = pickle.dumps(self.workload)
        specs = chain.from_iterable(
            _replication(pickled, number, self.num_requests) for number in range(self.replications)
        )
        return [Request.from_spec(replace(spec, id=id_)) for id_, spec in enumerate(specs)]


def num_recorded(workload: Workload) -> int | None:
    """How many requests a recorded trace has; None for a random workload."""
    return len(_drawn(pickle.dumps(workload), None, None)) if isinstance(workload, TraceReplay) else None


def natural_rate(workload: Workload, num_requests: int) -> float:
    """Mean requests per second of a workload as its settings stand.

    Raises:
        ConfigError: all of its requests arrive together.
    """
    return _natural_rate(pickle.dumps(workload), num_requests)


def queue_of(workload: Workload) -> Draw | None:
    """What draws the replications of a workload for `Control`; None where only whole requests can be drawn."""
    if not isinstance(workload, OpenLoop):
        return None
    pickled = pickle.dumps(workload)

    def draw(number: int, requests: int) -> tuple[Floats, Floats]:
        trace = replace(workload, seed=workload.seed + number, num_requests=requests).trace()
        assert trace.arrival_time is not None, "of an open loop"
        work = (trace.prompt_tokens + trace.output_tokens).astype(float)
        return (trace.arrival_time - trace.arrival_time[0]) * _natural_rate(pickled, requests), work

    return draw


@lru_cache(maxsize=2)
def _workload(pickled: bytes) -> Workload:
    workload: Workload = pickle.loads(pickled)
    return workload


@lru_cache(maxsize=8)
def _drawn(pickled: bytes, number: int | None, num_requests: int | None) -> Sequence[RequestSpec]:
    """The requests of a workload with another seed and length; None keeps those of the settings."""
    workload: Any = _workload(pickled)
    if number is not None:
        workload = replace(workload, seed=workload.seed + number, num_requests=num_requests)
    return [spec_of(request) for request in workload.requests(None)]


def _replication(pickled: bytes, number: int, num_requests: int) -> Sequence[RequestSpec]:
    """What replication `number` asks for."""
    if not isinstance(_workload(pickled), TraceReplay):
        return _drawn(pickled, number, num_requests)
    return _drawn(pickled, None, None)[number * num_requests :][:num_requests]


@lru_cache(maxsize=2)
def _natural_rate(pickled: bytes, num_requests: int) -> float:
    workload = _workload(pickled)
    if isinstance(workload, OpenLoop) and (rate := getattr(workload.arrivals, "rate", None)):
        return float(rate)
    if isinstance(workload, TraceReplay):
        drawn = [_drawn(pickled, None, None)]
    else:
        drawn = [_drawn(pickled, number, num_requests) for number in range(_NUM_FOR_RATE)]
    return _mean_rate(drawn, pickled)


def _mean_rate(replications: Sequence[Sequence[RequestSpec]], pickled: bytes) -> float:
    if not (spans := sum(specs[-1].arrival_time - specs[0].arrival_time for specs in replications)) > 0:
        remedy = "its requests arrive together; choose an open loop or a trace with times, as in workload=open_loop"
        raise ConfigError(f"workload: {_workload(pickled)!r} has no rate; {remedy}")
    return sum(len(specs) - 1 for specs in replications) / spans


def replicate(settings: Settings, number: int, rate: float, num_requests: int) -> Settings:
    """Returns the settings of the run that serves one replication at one rate."""
    return _with_workload(settings, Replication(settings.workload, number, rate, num_requests))


def highest_rate(settings: Settings, share: float, replications: int, num_requests: int) -> float:
    """The rate at which this share of a workload's requests can meet their objectives under any policy, at most (B3).

    Raises:
        ConfigError: the bounds are not valid for this workload.
    """
    run = assemble(together(settings, replications, num_requests))
    return bounds_of(run)(run.requests).rate_attained(share)


def together(settings: Settings, replications: int, num_requests: int) -> Settings:
    """Returns the settings of a run with the requests of several replications."""
    return _with_workload(settings, Together(settings.workload, replications, num_requests))


def _with_workload(settings: Settings, workload: Any) -> Settings:
    return replace(settings, workload=workload, timeline=False, decisions=False, stream="off")


def simulate(settings: Settings, rule: Rule, number: int, rate: float, num_requests: int, warmup: int) -> Outcome:
    """Serves one replication at one rate to its end. warmup: requests at the beginning, and at the end, that do not count."""
    began = time.process_time()
    run = assemble(replicate(settings, number, rate, num_requests))
    served = collect_served(run.engine.run())
    first, end = warmup, num_requests - warmup
    part = select(served, first, end)
    counts = tuple(criterion.good(run.requests[first:end], part) for criterion in rule.criteria)
    in_system = rate * float(served.end_to_end.mean()) if len(served.id) else float("inf")
    return Outcome(
        rate, number, num_requests, warmup, counts, in_system, time.process_time() - began, run.cost.num_outside
    )
