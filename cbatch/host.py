"""The serving loop, the only one: hands requests over as they arrive, and takes the turns of their host in between.

    drive   | arrivals.due -> host.arrive | host.turn -> arrivals.ended | ... | arrivals.wait -> host.sleep_until | ...

A host is an `Engine` or a `Cluster`. Time advances in `turn` and `sleep_until`: on the executor's clock, virtual in simulation.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, Protocol

from cbatch.arrivals import Arrivals
from cbatch.errors import PolicyError
from cbatch.record import RunRecord
from cbatch.request import Request


class Host(Protocol):
    """Serves the requests that it is handed.

    record: the iterations and requests that have ended. iteration: number of the iteration to plan next.
    """

    record: RunRecord

    @property
    def iteration(self) -> int: ...

    @property
    def num_in_flight(self) -> int:
        """Iterations launched and not yet ended."""

    def now(self) -> float:
        """Seconds on the host's clock."""

    def next_at(self) -> float:
        """Returns when the host takes its next turn unless a request arrives before; infinity if it has nothing to do."""

    def arrive(self, request: Request, now: float) -> None:
        """Takes a request that has arrived by `now`. The policy sees the request when it makes its next plan."""

    def turn(self, until: float) -> Sequence[Request]:
        """Takes the next turn, or a leap over turns that begin before `until`; waits for it where necessary.

        Returns the requests that have ended.
        """

    def sleep_until(self, time: float) -> None:
        """Waits until `time`, or until the host can take a turn."""

    def standstill(self, num_unfinished: int) -> PolicyError:
        """Returns the error for requests that are left although nothing computes and nothing arrives."""


class Observer(Protocol):
    """Follows an engine's state, for a router."""

    def ended(self, request: Request) -> None:
        """A request has ended."""

    def left(self, request: Request) -> None:
        """Another engine continues a request."""

    def changed(self, at: float, num_used: int, earlier: Sequence[tuple[float, int]] = ()) -> None:
        """An iteration was launched or absorbed. at: seconds. num_used: KV blocks. earlier: both, of the other iterations of a leap."""


@contextmanager
def uncollected(real_time: bool) -> Iterator[None]:
    """Spares what there is from the garbage collector in real time: a search through a process with PyTorch stops it for a third of a second."""
    if real_time:
        gc.freeze()
    try:
        yield
    finally:
        if real_time:
            gc.unfreeze()


def drive(host: Host, arrivals: Arrivals, on_turn: Callable[[Any], object] = lambda host: None) -> RunRecord:
    """Serves until every request has ended. on_turn: called with the host after each turn or leap."""
    while arrivals.num_unfinished or host.num_in_flight:
        advance(host, arrivals)
        on_turn(host)
    return host.record


def advance(host: Host, arrivals: Arrivals) -> None:
    """Waits if there is nothing to do yet, hands over the requests that have arrived, and takes a turn."""
    at, arrival = host.next_at(), arrivals.next()
    if at < arrival and arrivals.all_known:
        for request in host.turn(arrival):
            arrivals.ended(request)
        return
    now = host.now()
    if at > now and arrival > now:
        if (time := min(at, arrival)) == inf and not host.num_in_flight:
            raise host.standstill(arrivals.num_unfinished)
        arrivals.wait(host, time)
        at, now, arrival = host.next_at(), host.now(), arrivals.next()
    if arrival <= now:
        idle = at > now and not host.num_in_flight
        for request in arrivals.due(now, None if idle else host.iteration):
            host.arrive(request, now)
        at, now, arrival = host.next_at(), host.now(), arrivals.next()  # in this order: real time goes on
    if at <= now:
        for request in host.turn(arrival):
            arrivals.ended(request)
