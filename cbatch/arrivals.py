"""Who arrives next: the one seam through which requests reach an engine.

    engine --- due(now, iteration) --> the requests that have arrived by now
           --- next() ---------------> when the next one arrives: until then the engine may idle, or leap over iterations
           --- ended(request) -------> what follows that request, if anything does, is known from now on

Times are seconds on the executor's clock.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Protocol

from cbatch.errors import WorkloadError
from cbatch.request import Request


class Arrivals(Protocol):
    """The requests of a run in the order of their arrival.

    num_unfinished: requests that are known and have not ended, arrived or not. The run ends when it is 0.
    """

    num_unfinished: int

    def due(self, now: float, iteration: int | None) -> Sequence[Request]:
        """Takes out the requests that have arrived.

        iteration: number of the iteration to plan next. None: nothing is left to compute, so that no iteration would come; the
            first request that waits for one arrives at once.
        """

    def next(self) -> float:
        """Returns the time of the next arrival; infinity if none is known."""

    def ended(self, request: Request) -> None:
        """Notes that a request has ended."""


class KnownIds:
    """The ids of a run's requests. Those that follow each other from 0 on take no memory."""

    def __init__(self) -> None:
        self._below, self._others = 0, set[int]()

    def add(self, request: Request) -> None:
        """Raises WorkloadError if the id is known: tokens and figures of two requests would be taken for those of a single one."""
        if 0 <= request.id < self._below or request.id in self._others:
            problem = f"request {request.id} is submitted twice, or two requests have this id"
            raise WorkloadError(f"{problem}; make a request with its own id for each")
        self._others.add(request.id)
        while self._below in self._others:
            self._others.remove(self._below)
            self._below += 1


class Recorded(Arrivals):
    """Requests whose arrival times and iterations are known before the run, or are added while it goes on."""

    def __init__(self) -> None:
        self.num_unfinished = 0
        self._ids = KnownIds()
        self._pending: deque[Request] = deque()

    def add(self, requests: Sequence[Request]) -> None:
        """Raises WorkloadError as `KnownIds.add`."""
        for request in requests:
            self._ids.add(request)
        order = sorted(
            [*self._pending, *requests],
            key=lambda request: (request.arrival_time, request.arrival_iteration, request.id),
        )
        self._pending = deque(order)
        self.num_unfinished += len(requests)

    def due(self, now: float, iteration: int | None) -> Sequence[Request]:
        pending, arrived = self._pending, list[Request]()
        if iteration is None:
            return [pending.popleft()] if pending and pending[0].arrival_time <= now else arrived
        while pending and pending[0].arrival_time <= now and pending[0].arrival_iteration <= iteration:
            arrived.append(pending.popleft())
        return arrived

    def next(self) -> float:
        return self._pending[0].arrival_time if self._pending else inf

    def ended(self, request: Request) -> None:
        self.num_unfinished -= 1


class Stream(Arrivals):
    """Requests that are made when they are about to arrive, so that few exist at any time."""

    def __init__(self, requests: Iterable[Request], check: Callable[[Request], object]) -> None:
        """
        Args:
            requests: in the order of their arrival times.
            check: raises WorkloadError for a request that cannot be served (`Engine.check_fits`).

        Raises:
            WorkloadError: a request arrives before an earlier one, or by iteration, or has a known id; also later, when that
                request is made.
        """
        self.num_unfinished = 0
        self._ids = KnownIds()
        self._left, self._check = iter(requests), check
        self._first: Request | None = None
        self._make()

    def due(self, now: float, iteration: int | None) -> Sequence[Request]:
        arrived = []
        while self._first is not None and self._first.arrival_time <= now:
            arrived.append(self._first)
            self._make()
        return arrived

    def next(self) -> float:
        return inf if self._first is None else self._first.arrival_time

    def ended(self, request: Request) -> None:
        self.num_unfinished -= 1

    def _make(self) -> None:
        before = 0.0 if self._first is None else self._first.arrival_time
        self._first = next(self._left, None)
        if self._first is None:
            return
        if self._first.arrival_time < before or self._first.arrival_iteration:
            problem = f"request {self._first.id} arrives by iteration, or before an earlier one"
            raise WorkloadError(f"{problem}; order a stream by arrival time")
        self._check(self._first)
        self._ids.add(self._first)
        self.num_unfinished += 1
