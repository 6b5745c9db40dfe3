"""The waiting requests in the order of a key: a heap: a plan costs no more with 100,000 of them than with ten."""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any

from cbatch import Request, View


class WaitingQueue:
    """Requests by ascending key; ties: by arrival (id). A policy pushes them on arrival and when it preempts them."""

    def __init__(self, key: Callable[[Request], Any]) -> None:
        """key: of a request, read when it is pushed; it must not change while the request waits."""
        self.key = key
        self._heap: list[tuple[Any, int, Request]] = []

    def push(self, *requests: Request) -> None:
        for request in requests:
            heappush(self._heap, (self.key(request), request.id, request))

    def in_order(self, view: View) -> Iterator[Request]:
        """Yields the waiting requests in order. Asking for the next takes the last one out: it has been admitted."""
        while self._heap:
            request = self._heap[0][-1]
            if view.is_waiting(request):
                yield request
            heappop(self._heap)
