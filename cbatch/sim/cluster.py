"""Replicas of one model, each with an engine of its own, and the router before them.

Requests are routed when they arrive, from what the router sees then: every replica has been simulated up to that time.
Knows nothing of what runs in a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Protocol

from cbatch.engine import Engine
from cbatch.errors import ConfigError, WorkloadError
from cbatch.record import RunRecord
from cbatch.request import Request
from cbatch.sim.stages import StageAccount


class Router(Protocol):
    def choose(self, request: Request, unfinished: Sequence[int]) -> int:
        """The replica for a request. unfinished: requests that each replica has been given and has not ended."""
        ...


class RoundRobin:
    """One replica after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, unfinished: Sequence[int]) -> int:
        chosen = self._next % len(unfinished)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """The replica with the fewest unfinished requests; the first of equals."""

    def choose(self, request: Request, unfinished: Sequence[int]) -> int:
        return min(range(len(unfinished)), key=unfinished.__getitem__)


def make_router(name: str) -> Router:
    """round_robin or least_loaded. Raises ConfigError for any other name."""
    match name:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
    raise ConfigError(f"router={name} is unknown; choose round_robin or least_loaded")


class Cluster:
    """Replicas behind a router, to be used like an `Engine`: `submit`, `run`, and what it shows of itself.

    Requests are routed in `run`, when they arrive. `state` is the first replica's: all are of the same size.
    """

    def __init__(self, engines: Sequence[Engine], router: Router) -> None:
        self.engines = list(engines)
        self.router = router
        self.state = engines[0].state
        self.executor = _Executors([engine.executor for engine in engines])
        self.record = RunRecord()
        self._requests: list[Request] = []

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests for their arrival times.

        Raises:
            WorkloadError: a request arrives by iteration, which means nothing where several engines count their own; or
                as in `Engine.submit`.
        """
        new = list(requests)
        for request in new:
            if request.arrival_iteration:
                raise WorkloadError(
                    f"request {request.id} arrives by iteration, which several replicas do not share; "
                    "give arrival times"
                )
            self.engines[0].check_fits(request)
        self._requests = sorted([*self._requests, *new], key=lambda request: (request.arrival_time, request.id))

    def run(self, on_step: Callable[[Engine], None] = lambda engine: None) -> RunRecord:
        """Serve until every request has ended. `on_step`, which shows the progress of one engine, is not called."""
        for time, arrivals in groupby(self._requests, key=lambda request: request.arrival_time):
            for engine in self.engines:
                while engine.num_unfinished and engine.executor.now() < time:
                    engine.step()
            self._route(arrivals)
        self.record = merged([engine.run() for engine in self.engines])
        return self.record

    def _route(self, arrivals: Iterable[Request]) -> None:
        unfinished = [engine.num_unfinished for engine in self.engines]
        routed: list[list[Request]] = [[] for _ in self.engines]
        for request in arrivals:
            chosen = self.router.choose(request, unfinished)
            routed[chosen].append(request)
            unfinished[chosen] += 1
        for engine, batch in zip(self.engines, routed, strict=True):
            engine.submit(batch)


class _Executors:
    """What is asked of one executor, asked of all."""

    def __init__(self, executors: Sequence[Any]) -> None:
        self._executors = executors

    def now(self) -> float:
        return float(max(executor.now() for executor in self._executors))

    def accounts(self) -> list[StageAccount]:
        """Of the first replica's stages, then the second's, and so on."""
        return [account for executor in self._executors for account in executor.accounts()]

    def close(self) -> None:
        for executor in self._executors:
            executor.close()


def merged(records: Sequence[RunRecord]) -> RunRecord:
    """One record of all replicas, in the order in which tokens were received; iterations are numbered anew."""
    whole = RunRecord()
    steps = sorted(
        (
            (step.received_at, replica, place)
            for replica, record in enumerate(records)
            for place, step in enumerate(record.steps)
        )
    )
    for iteration, (_, replica, place) in enumerate(steps):
        record = records[replica]
        whole.add_step(record.steps[place]._replace(iteration=iteration), record.receivers[place])
    whole.requests = sorted(
        (request for record in records for request in record.requests),
        key=lambda request: (request.finished_at, request.id),
    )
    return whole
