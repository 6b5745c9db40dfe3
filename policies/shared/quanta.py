"""The queues of multi-level feedback: a request that uses up its quantum moves to the tail of the next queue, of twice the quantum.

Also who was not served for long, for promotions.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

from cbatch import Request, View


class Quanta:
    """Each request's queue, its place there, and the seconds that it has used of the quantum."""

    def __init__(self, quantum: float) -> None:
        """quantum: seconds of queue 0."""
        self.quantum = quantum
        self._place: dict[Request, tuple[int, int]] = {}  # number of the queue, and of the joining
        self._used: dict[Request, float] = {}
        self._num_joined = 0

    def place(self, request: Request) -> tuple[int, int]:
        """Ascending: from the head of the first queue to the tail of the last."""
        return self._place[request]

    def first_queue(self, seconds: float) -> int:
        """The first queue whose quantum holds so many seconds."""
        return next(number for number in count() if self.quantum * 2**number >= seconds)

    def join(self, request: Request, number: int) -> None:
        """Enters a queue at its tail."""
        self._num_joined += 1
        self._place[request], self._used[request] = (number, self._num_joined), 0.0

    def charge(self, request: Request, seconds: float) -> None:
        self._used[request] += seconds
        if self._used[request] > self.quantum * 2 ** (number := self._place[request][0]):
            self.join(request, number + 1)

    def leave(self, request: Request) -> None:
        self._place.pop(request, None)
        self._used.pop(request, None)


class Unserved:
    """Requests by the time since which they were not served: since their last token, or since they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []  # with times after which a request may have been served again
        self._known: set[Request] = set()
        self._num_added = 0  # the requests of several runs may have the same ids

    def add(self, request: Request, since: float) -> None:
        """Adds a request, unless it is known."""
        if request not in self._known:
            self._known.add(request)
            self._push(since, request)

    def longer_than(self, seconds: float, view: View) -> Iterator[Request]:
        """Yields each request that was not served for `seconds`, the longest first, and forgets it."""
        while self._heap and view.now - self._heap[0][0] >= seconds:
            since, _, request = heappop(self._heap)
            served = view.now if view.is_in_flight(request) else request.last_token_at or since
            if request.finished_at is None and served > since:
                self._push(served, request)
                continue
            self._known.discard(request)
            if request.finished_at is None:
                yield request

    def _push(self, since: float, request: Request) -> None:
        self._num_added += 1
        heappush(self._heap, (since, self._num_added, request))
