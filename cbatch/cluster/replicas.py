"""Replicas of one model, each with its own engine, behind a router.

In simulation a request is routed when it arrives, after every replica has been simulated up to that time. Where time is real,
replicas serve at the same time: `live`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import index
from typing import Any, SupportsIndex

from cbatch.arrivals import note_id
from cbatch.calls import call
from cbatch.cluster.routers import Replica, Router
from cbatch.engine import Engine
from cbatch.errors import PolicyError, WorkloadError
from cbatch.policy import Policy, copy_policy
from cbatch.record import RunRecord
from cbatch.request import Request
from cbatch.server import Server


class Cluster:
    """Engines behind a router, with the interface of one `Engine`. Requests are routed in `run`, when they arrive."""

    def __init__(self, engines: Sequence[Engine], router: Router) -> None:
        self.engines = list(engines)
        self.replicas: Sequence[Replica] = [Replica(engine) for engine in self.engines]
        self.router = router
        self.executor = Executors([engine.executor for engine in engines])
        self.record = RunRecord()
        self._requests: list[Request] = []
        self._ids = set[int]()

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests. Raises WorkloadError for one that arrives by iteration, and as `Engine.submit` does."""
        new = list(requests)
        for request in new:
            if request.arrival_iteration:
                problem = f"request {request.id} arrives by iteration, which several replicas do not share"
                raise WorkloadError(f"{problem}; give arrival times")
            self.engines[0].check_fits(request)
            note_id(request, self._ids)
        self._requests = sorted([*self._requests, *new], key=lambda request: (request.arrival_time, request.id))

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended, arrived or not."""
        return len(self._requests) - sum(len(engine.record.requests) for engine in self.engines)

    def run(self, on_step: Callable[[Any], None] = lambda cluster: None) -> RunRecord:
        """Serves until every request has ended. `on_step`, for progress bars, is called with the cluster now and then."""
        for time, arrivals in groupby(self._requests, key=lambda request: request.arrival_time):
            for engine in self.engines:
                engine.run_until(time)
            self._route(arrivals)
            on_step(self)
        self.record = merge([engine.run(lambda _: on_step(self)) for engine in self.engines])
        return self.record

    def _route(self, arrivals: Iterable[Request]) -> None:
        for request in arrivals:
            self.replicas[self._choose(request)].take(request)
        for replica in self.replicas:
            replica.submit()

    def _choose(self, request: Request) -> int:
        where = f"router {type(self.router).__name__}, request {request.id}"
        chosen: Any = call(where, self.router.choose, request, self.replicas)
        if not isinstance(chosen, SupportsIndex) or not 0 <= index(chosen) < len(self.replicas):
            last = len(self.replicas) - 1
            raise PolicyError(f"{where}: choose() returned {chosen!r}; return the index of a replica, from 0 to {last}")
        return index(chosen)


class Executors:
    """The executors of all replicas, with the methods of an executor that are called after a run."""

    def __init__(self, executors: Sequence[Any]) -> None:
        self.executors = executors

    def now(self) -> float:
        return float(max(executor.now() for executor in self.executors))

    def close(self) -> None:
        for executor in self.executors:
            executor.close()


@dataclass(frozen=True, eq=False)
class ReplicatedServer:
    """Serves like a `Server`, on one server per replica behind a router. Each replica has a copy of the policy.

    router: copied for each run. cluster: `LiveCluster` where time is real.
    """

    servers: Sequence[Server]
    router: Router
    cluster: Callable[[Sequence[Engine], Router], Cluster] = Cluster

    def engine(self, policy: Policy, requests: Iterable[Request] = (), *, asynchronous: bool | None = None) -> Cluster:
        """As `Server.engine`."""
        policies = [policy, *(copy_policy(policy) for _ in self.servers[1:])]
        engines = [
            server.engine(copy, asynchronous=asynchronous) for server, copy in zip(self.servers, policies, strict=True)
        ]
        cluster = self.cluster(engines, copy_policy(self.router, "router"))
        cluster.submit(requests)
        return cluster

    def close(self) -> None:
        for server in self.servers:
            server.close()


def merge(records: Sequence[RunRecord]) -> RunRecord:
    """Returns one record of all replicas, with steps renumbered in the order in which tokens were received.

    Times of copies and stages are left out: they are a replica's own.
    """
    whole = RunRecord()
    pairs = (zip(record.steps, record.receivers, strict=True) for record in records)
    steps = ((*pair, replica) for replica, of_record in enumerate(pairs) for pair in of_record)
    for iteration, (step, receivers, replica) in enumerate(sorted(steps, key=lambda step: step[0].received_at)):
        whole.add_step(step._replace(iteration=iteration), receivers)
        whole.replicas.append(replica)
    whole.replica_of = {request.id: replica for replica, record in enumerate(records) for request in record.requests}
    requests = chain.from_iterable(record.requests for record in records)
    whole.requests = sorted(requests, key=lambda request: (request.finished_at, request.id))
    return whole
