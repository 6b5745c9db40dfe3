"""Replications of a workload at any rate with common random numbers: the rate only stretches the time between arrivals.

In a conversation, only the first turn's arrival moves. Pauses between turns stay, since clients do not think faster under load.
Replication k of a random workload has seed + k. Its arrivals, lengths and classes are the same at each rate and under each policy.
Replication k of a recorded trace is the trace's k-th piece, stretched to the rate. Bursts, lengths and their order stay as
recorded; the drift of the rate over hours does not.
"""

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from cbatch import ConfigError, Request, RequestSpec
from cbatch.request import spec_of
from experiments.workloads import ClosedLoop, GammaArrivals, OpenLoop, TraceReplay, Vocabulary, Workload
from experiments.workloads.open_loop import DrawnRequests, PrefixGroups
from experiments.workloads.trace import Trace

_FOR_RATE, _FEWEST_FOR_RATE = 500_000, 4
"""For the mean rate: requests, and replications where only whole requests can be drawn."""


@dataclass(frozen=True)
class Replication:
    """A workload for `assemble`: replication `number` of another workload.

    rate: mean requests per second. num_requests: requests per replication.
    """

    workload: Workload
    number: int
    rate: float
    num_requests: int

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        pickled = pickle.dumps(self.workload)
        specs = _replication(pickled, self.number, self.num_requests)
        recorded = isinstance(self.workload, TraceReplay)
        natural = _mean_rate([_begins(specs)], self.workload) if recorded else _natural_rate(pickled, self.num_requests)
        factor, begin, stretched = natural / self.rate, specs[0].arrival_time, list[RequestSpec]()
        for spec, first in zip(specs, first_arrivals(specs)[1], strict=True):
            time = (first - begin) * factor + (spec.arrival_time - first)
            stretched.append(replace(spec, arrival_time=time))
        stretched.sort(key=attrgetter("arrival_time"))
        return [Request.from_spec(replace(spec, id=id_)) for id_, spec in enumerate(stretched)]


@dataclass(frozen=True)
class Together:
    """A workload for `assemble`: the requests of several replications, which share no prefix, at the workload's natural rate."""

    workload: Workload
    replications: int
    num_requests: int

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        pickled, requests = pickle.dumps(self.workload), list[Request]()
        for number in range(self.replications):
            for spec in _replication(pickled, number, self.num_requests):
                own = replace(spec, id=len(requests), salt=f"{number} {spec.salt}")
                requests.append(Request.from_spec(own))
        return requests


def over_sessions(workload: Workload) -> bool:
    """Returns whether a workload's load is its number of concurrent sessions, not a rate."""
    return isinstance(workload, ClosedLoop) and workload.answers_back


def at_a_time(workload: Workload, number: int, sessions: int, num_requests: int) -> Any:
    """Returns replication `number` of a workload, with a steady start; each number of concurrent sessions begins the same sessions.

    num_requests: of a workload that draws its sessions.
    """
    size = {} if workload.num_requests is None else {"num_requests": num_requests}
    changes: dict[str, Any] = {"seed": workload.seed + number, "sessions": sessions, "steady": True, **size}
    return replace(workload, **changes)


def num_recorded(workload: Workload) -> int | None:
    """Returns the number of requests in a recorded trace; None for a random workload."""
    return len(_drawn(pickle.dumps(workload), None, None)) if isinstance(workload, TraceReplay) else None


def natural_rate(workload: Workload, num_requests: int) -> float:
    """Returns a workload's mean requests per second according to its settings. Raises ConfigError if all requests arrive together."""
    return _natural_rate(pickle.dumps(workload), num_requests)


def check_random(workload: Workload, num_requests: int) -> None:
    """Raises ConfigError if all replications of a random workload are equal, so that they show no spread."""
    made = at_a_time if over_sessions(workload) else Replication
    first, second = (map(_without_seed, made(workload, number, 1, num_requests).requests(None)) for number in (0, 1))
    if list(first) == list(second):
        problem = "the seed changes nothing, so that replications are equal and have no interval"
        raise ConfigError(f"workload: {workload!r}: {problem}; draw its arrivals or its lengths at random")


def _without_seed(request: Request) -> RequestSpec:
    """Returns the request as sent by the client, without its seed. Times are rounded to microseconds."""
    spec = spec_of(request)
    return replace(spec, arrival_time=round(spec.arrival_time, 6), sampling=replace(spec.sampling, seed=0))


def first_arrivals(specs: Iterable[RequestSpec]) -> tuple[list[float], list[float]]:
    """Returns the begin of each conversation, in order, and for each request the begin of its conversation.

    A request without a session is a separate conversation.
    """
    begins: dict[str | int, float] = {}
    of_each = []
    for spec in specs:
        name = spec.id if spec.session is None else spec.session
        of_each.append(begins.setdefault(name, spec.arrival_time))
    return list(begins.values()), of_each


@lru_cache(maxsize=8)
def _drawn(pickled: bytes, number: int | None, num_requests: int | None) -> Sequence[RequestSpec]:
    """Returns the requests of a workload with another seed and length. None keeps seed and length of the settings."""
    workload: Any = pickle.loads(pickled)
    if getattr(workload, "answers_back", False):
        problem = "requests follow the ends of others, so that no rate of arrivals describes them"
        raise ConfigError(f"workload={workload!r}: {problem}; leave out workload.load")
    if number is not None:
        workload = replace(workload, seed=workload.seed + number, num_requests=num_requests)
    return [spec_of(request) for request in workload.requests(None)]


def _replication(pickled: bytes, number: int, num_requests: int) -> Sequence[RequestSpec]:
    if not isinstance(pickle.loads(pickled), TraceReplay):
        return _drawn(pickled, number, num_requests)
    return _drawn(pickled, None, None)[number * num_requests :][:num_requests]


@lru_cache(maxsize=2)
def _natural_rate(pickled: bytes, num_requests: int) -> float:
    workload = pickle.loads(pickled)
    if isinstance(workload, OpenLoop | PrefixGroups) and type(workload.arrivals) is GammaArrivals:  # its mean is exact
        return workload.arrivals.rate * getattr(workload, "rate_scale", 1.0)
    if isinstance(workload, TraceReplay):
        return _mean_rate([_begins(_drawn(pickled, None, None))], workload)
    if not isinstance(workload, DrawnRequests) or workload.answers_back:
        drawn = (_drawn(pickled, number, num_requests) for number in range(_FEWEST_FOR_RATE))
        return _mean_rate(map(_begins, drawn), workload)
    seeds = range(workload.seed, workload.seed + max(_FOR_RATE // num_requests, _FEWEST_FOR_RATE))
    traces = (replace(workload, seed=seed, num_requests=num_requests).trace() for seed in seeds)
    return _mean_rate(map(_begins_of_trace, traces), workload)


def _begins(specs: Sequence[RequestSpec]) -> tuple[Sequence[float], int]:
    """Returns the begins of conversations, and the number of their requests."""
    return first_arrivals(specs)[0], len(specs)


def _begins_of_trace(trace: Trace) -> tuple[Sequence[float], int]:
    assert trace.arrival_time is not None, "of drawn requests"
    begins = trace.arrival_time[trace.fields.get("turn", np.zeros(len(trace))) == 0]
    return begins.tolist(), len(trace)


def _mean_rate(replications: Iterable[tuple[Sequence[float], int]], workload: Workload) -> float:
    """Returns the conversations per second, multiplied by the mean number of requests per conversation. replications: see `_begins`."""
    measured = list(replications)
    seconds = sum(begins[-1] - begins[0] for begins, _ in measured)
    if not seconds > 0:
        remedy = "its requests arrive together; choose an open loop or a trace with times, as in workload=open_loop"
        raise ConfigError(f"workload: {workload!r} has no rate; {remedy}")
    per_conversation = sum(num_requests for _, num_requests in measured) / sum(len(begins) for begins, _ in measured)
    return per_conversation * sum(len(begins) - 1 for begins, _ in measured) / seconds
