"""Replicas of one model, each with its own engine, behind a router.

A request is routed when it arrives, after every replica has been simulated up to that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Protocol

from cbatch.engine import Engine
from cbatch.errors import ConfigError, WorkloadError
from cbatch.executor import Executor
from cbatch.policy import Policy
from cbatch.record import RunRecord
from cbatch.request import Request
from cbatch.server import Server
from cbatch.sim.stages import StageAccount


class Router(Protocol):
    def choose(self, request: Request, unfinished: Sequence[int]) -> int:
        """Returns the replica for a request. unfinished: requests routed to each replica that have not ended."""


class RoundRobin:
    """Takes the replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, unfinished: Sequence[int]) -> int:
        chosen = self._next % len(unfinished)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """Chooses the replica with the fewest unfinished requests, the first on a tie."""

    def choose(self, request: Request, unfinished: Sequence[int]) -> int:
        return min(range(len(unfinished)), key=unfinished.__getitem__)


def make_router(name: str) -> Router:
    """Returns the router `round_robin` or `least_loaded`; raises ConfigError for any other name."""
    routers: dict[str, type[Router]] = {"round_robin": RoundRobin, "least_loaded": LeastLoaded}
    if name not in routers:
        raise ConfigError(f"router={name} is unknown; choose {' or '.join(routers)}")
    return routers[name]()


class Cluster:
    """Engines behind a router, with the interface of one `Engine`. Requests are routed in `run`, when they arrive."""

    def __init__(self, engines: Sequence[Engine], router: Router) -> None:
        self.engines = list(engines)
        self.router = router
        self.executor = _Executors([engine.executor for engine in engines])
        self.record = RunRecord()
        self._requests: list[Request] = []

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests. Raises WorkloadError for one that arrives by iteration, and as `Engine.submit` does."""
        new = list(requests)
        for request in new:
            if request.arrival_iteration:
                problem = f"request {request.id} arrives by iteration, which several replicas do not share"
                raise WorkloadError(f"{problem}; give arrival times")
            self.engines[0].check_fits(request)
        self._requests = sorted([*self._requests, *new], key=lambda request: (request.arrival_time, request.id))

    def run(self, on_step: Callable[[Engine], None] = lambda engine: None) -> RunRecord:
        """Serves until every request has ended. `on_step` is not called: it is for a single engine."""
        for time, arrivals in groupby(self._requests, key=lambda request: request.arrival_time):
            for engine in self.engines:
                while engine.num_unfinished and engine.executor.now() < time:
                    engine.step()
            self._route(arrivals)
        self.record = merge([engine.run() for engine in self.engines])
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
    """The executors of all replicas, with those methods of one that are called after a run."""

    def __init__(self, executors: Sequence[Any]) -> None:
        self._executors = executors

    def now(self) -> float:
        return float(max(executor.now() for executor in self._executors))

    def accounts(self) -> list[StageAccount]:
        """Returns the accounts of all stages, replica by replica."""
        return [account for executor in self._executors for account in executor.accounts()]

    def close(self) -> None:
        for executor in self._executors:
            executor.close()


@dataclass(frozen=True, eq=False)
class ReplicatedServer:
    """Serves like a `Server`, on one server per replica behind a router. Each replica has a copy of the policy."""

    servers: Sequence[Server[Executor]]
    router: str

    def engine(self, policy: Policy, requests: Iterable[Request] = (), *, asynchronous: bool | None = None) -> Cluster:
        """As `Server.engine`."""
        policies = [policy, *(deepcopy(policy) for _ in self.servers[1:])]
        engines = [
            server.engine(copy, asynchronous=asynchronous) for server, copy in zip(self.servers, policies, strict=True)
        ]
        cluster = Cluster(engines, make_router(self.router))
        cluster.submit(requests)
        return cluster

    def close(self) -> None:
        for server in self.servers:
            server.close()


def merge(records: Sequence[RunRecord]) -> RunRecord:
    """Returns one record of all replicas: steps renumbered in the order in which their tokens were received."""
    whole = RunRecord()
    steps = (zip(record.steps, record.receivers, strict=True) for record in records)
    in_order = sorted(chain.from_iterable(steps), key=lambda step: step[0].received_at)
    for iteration, (step, receivers) in enumerate(in_order):
        whole.add_step(step._replace(iteration=iteration), receivers)
    requests = chain.from_iterable(record.requests for record in records)
    whole.requests = sorted(requests, key=lambda request: (request.finished_at, request.id))
    return whole
