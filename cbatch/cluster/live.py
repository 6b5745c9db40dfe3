"""Replicas in real time: each engine serves on a thread of its own, and the thread that calls `run` routes arrivals.

router     sleeps until t1 | routes the arrivals at t1, posts them to replicas | sleeps until t2, or until a request has ended
replica    plans, computes, posts reports and ended requests | takes the posted requests into its next plan | ...
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from cbatch.arrivals import Posted
from cbatch.cluster.cluster import Cluster
from cbatch.engine import Engine
from cbatch.errors import PolicyError
from cbatch.host import drive
from cbatch.record import RunRecord
from cbatch.request import Request

_BETWEEN_TURNS = 0.1  # seconds between calls of `on_turn`


class _Replica(Posted):
    """The requests of an engine that serves on a thread of its own, which sends the ended ones, and at last None or its exception."""

    def __init__(self, engine: Engine, send: Callable[[Request | BaseException | None], object]) -> None:
        super().__init__(SimpleQueue())
        self._engine, self._send = engine, send
        self.thread = Thread(target=self._serve, name="replica", daemon=True)

    def receive(self, message: Any) -> None:
        if callable(message):
            message()
        else:
            super().receive(message)

    def ended(self, request: Request) -> None:
        super().ended(request)
        self._send(request)

    def _serve(self) -> None:
        try:
            drive(self._engine, self)
            self._send(None)
        except BaseException as error:
            self._send(error)


class LiveCluster(Cluster):
    """A `Cluster` whose replicas serve at the same time."""

    def run(self, on_turn: Callable[[Any], object] = lambda cluster: None) -> RunRecord:
        """Serves as `Cluster`; `on_turn` is called every 0.1 s. An exception in a replica, or here, ends all replicas."""
        with self._serving():
            return super().run(on_turn)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        self.executor.now()  # starts all clocks
        self._messages: SimpleQueue[Request | BaseException | None] = SimpleQueue()
        self._received: list[Request | BaseException | None] = []
        self._replicas = [_Replica(engine, self._messages.put) for engine in self.engines]
        self._num_serving, self._num_open = len(self._replicas), [0] * len(self._replicas)
        for replica in self._replicas:
            replica.thread.start()
        try:
            yield
        except BaseException:
            self.executor.close()
            for replica in self._replicas:
                replica.messages.put(None)
                replica.thread.join(timeout=10)
            raise

    # -- the host of `drive` ------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """The replicas that still serve, as what these have in flight is known to their threads alone."""
        return self._num_serving

    def now(self) -> float:
        return self.executor.now()

    def next_at(self) -> float:
        return inf if not self._received and self._messages.empty() else 0.0

    def arrive(self, request: Request, now: float) -> None:
        replica, _ = self.route(request, now)
        if self._rejected:
            raise PolicyError(
                f"router {type(self.router).__name__} rejected a request; routers do so in simulation only"
            )
        self._num_open[replica] += 1
        self._replicas[replica].messages.put(request)

    def sleep_until(self, time: float) -> None:
        if not self.arrivals.num_unfinished or (time == inf and not self.arrivals.follow_ends):
            for replica in self._replicas:
                replica.messages.put(None)
        if self.fleet is not None:
            self.fleet.advance(self.now())
            time = min(time, self.fleet.next_at)
        with suppress(Empty):
            self._received.append(self._messages.get(timeout=max(min(time - self.now(), _BETWEEN_TURNS), 0.0)))

    def turn(self, until: float) -> Sequence[Request]:
        """Returns the requests that have ended since the last call; raises the exception of a replica."""
        while not self._messages.empty():
            self._received.append(self._messages.get())
        received, self._received = self._received, []
        for message in received:
            if isinstance(message, BaseException):
                raise message
        self._num_serving -= received.count(None)
        ended = [message for message in received if isinstance(message, Request)]
        for request in ended:
            self._num_open[replica := self.replica_of[request.id]] -= 1
            if self.fleet is not None:
                self.fleet.note_idle(replica)
        return ended

    def _idle_at(self, replica: int) -> float:
        """Returns now if the ends of all its requests are known."""
        return inf if self._num_open[replica] else self.now()

    def _restart(self, replica: int) -> None:
        self._replicas[replica].messages.put(self.engines[replica].restart)
