"""Replicas in real time: each engine serves on a thread of its own, and the thread that calls `run` routes arrivals.

    caller     sleeps until t1 | routes arrivals at t1      | sleeps until t2 ...
    replica    serves until t1 | takes its routed requests  | serves until t2 ...

A replica takes its requests when its current iteration has ended, as a single engine does, and waits for no other replica.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from itertools import groupby
from queue import SimpleQueue
from threading import Thread
from typing import Any

from cbatch.cluster.replicas import Cluster, merge
from cbatch.cluster.routers import Replica, Router
from cbatch.engine import Engine
from cbatch.record import RunRecord
from cbatch.request import Request

_BETWEEN_STEPS = 0.1  # seconds between calls of `on_step`


class LiveReplica(Replica):
    """A replica on a thread of its own. Counters are current when they are read.

    served: the record once all requests have ended, or the exception that ended the replica.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.served: Future[RunRecord] = Future()
        self._routed: SimpleQueue[Sequence[Request] | None] = SimpleQueue()
        self._thread: Thread | None = None

    @property
    def num_unfinished(self) -> int:
        return len(self.requests)  # the engine does not count requests that it has not taken yet

    def submit(self) -> None:
        """Passes the requests taken to the replica's thread; for `LiveCluster`."""
        self._routed.put(self._new)
        self._new, self._outstanding = [], None

    def start(self, arrivals: Sequence[float]) -> None:
        """Serves from now on. arrivals: times at which `submit` will be called."""
        self._thread = Thread(target=self._run, args=(arrivals,), name="replica", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread before its requests have ended. Its executor is closed."""
        self._routed.put(None)
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _run(self, arrivals: Sequence[float]) -> None:
        try:
            self.served.set_result(self._serve(arrivals))
        except BaseException as error:
            self.served.set_exception(error)

    def _serve(self, arrivals: Sequence[float]) -> RunRecord:
        for time in arrivals:
            self._engine.run_until(time)
            requests = self._routed.get()
            if requests is None:
                return self._engine.record
            self._engine.submit(requests)
        return self._engine.run()


class LiveCluster(Cluster):
    """A `Cluster` whose replicas serve at the same time."""

    replicas: Sequence[LiveReplica]

    def __init__(self, engines: Sequence[Engine], router: Router) -> None:
        super().__init__(engines, router)
        self.replicas = [LiveReplica(engine) for engine in self.engines]

    def run(self, on_step: Callable[[Any], None] = lambda cluster: None) -> RunRecord:
        """Serves as `Cluster`. An exception in a replica, or here, ends all replicas."""
        groups = groupby(self._requests, key=lambda request: request.arrival_time)
        arrivals = [(time, list(requests)) for time, requests in groups]
        with self._serving([time for time, _ in arrivals]):
            for time, requests in arrivals:
                self._wait(time - self.executor.now())
                self._route(requests)
                on_step(self)
            while not all(replica.served.done() for replica in self.replicas):
                self._wait(_BETWEEN_STEPS)
                on_step(self)
            self._wait(0.0)
        self.record = merge([replica.served.result() for replica in self.replicas])
        return self.record

    def _wait(self, seconds: float) -> None:
        """Waits until all replicas have ended, or for `seconds`; raises the exception of a replica."""
        served = [replica.served for replica in self.replicas]
        for future in wait(served, max(seconds, 0.0), FIRST_EXCEPTION).done:
            future.result()

    @contextmanager
    def _serving(self, arrivals: Sequence[float]) -> Iterator[None]:
        self.executor.now()  # starts all clocks
        for replica in self.replicas:
            replica.start(arrivals)
        try:
            yield
        except BaseException:
            self.executor.close()
            for replica in self.replicas:
                replica.stop()
            raise
