"""The queues of multi-level feedback: a request that uses up its quantum moves to the tail of the next queue, with twice the quantum.

Also tracks requests that were not served for long, for promotions.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

from cbatch import Request, View


class Quanta:
    """Each request's queue, its place in the queue, and the used seconds of its quantum."""

    def __init__(self, quantum: float) -> None:
        """quantum: seconds of queue 0."""
        self.quantum = quantum
        self._place: dict[Request, tuple[int, int]] = {}  # queue, and order of joining
        self._used: dict[Request, float] = {}
        self._num_joined = 0

    def place(self, request: Request) -> tuple[int, int]:
        """Returns a request's place, ascending from the head of the first queue to the tail of the last queue."""
        return self._place[request]

    def first_queue(self, seconds: float) -> int:
        """Returns the first queue whose quantum is at least this many seconds."""
        return next(number for number in count() if self.quantum * 2**number >= seconds)

    def join(self, request: Request, number: int) -> None:
        """Adds a request at the tail of a queue."""
        self._num_joined += 1
        self._place[request], self._used[request] = (number, self._num_joined), 0.0

    def charge(self, request: Request, seconds: float, _samples: bool) -> None:
        self._used[request] += seconds
        if self._used[request] > self.quantum * 2 ** (number := self._place[request][0]):
            self.join(request, number + 1)

    def leave(self, request: Request) -> None:
        self._place.pop(request, None)
        self._used.pop(request, None)


class Unserved:
    """Requests by the time since which they were not served: their last token, or the time when they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []  # a request may have been served after its time
        self._known: set[Request] = set()
        self._num_added = 0  # ids may repeat across runs

    def add(self, request: Request, since: float) -> None:
        """Adds a request, unless it is already known."""
        if request not in self._known:
            self._known.add(request)
            self._push(since, request)

    def discard(self, request: Request) -> None:
        """Forgets a request that has ended, or that another replica continues."""
        self._known.discard(request)

    def longer_than(self, seconds: float, view: View) -> Iterator[Request]:
        """Yields and removes each request that was not served for `seconds`, longest first."""
        while self._heap and view.now - self._heap[0][0] >= seconds:
            since, _, request = heappop(self._heap)
            if request not in self._known:
                continue
            served = view.now if view.is_in_flight(request) else request.last_token_at or since
            if served > since:
                self._push(served, request)
                continue
            self._known.discard(request)
            yield request

    def _push(self, since: float, request: Request) -> None:
        self._num_added += 1
        heappush(self._heap, (since, self._num_added, request))
