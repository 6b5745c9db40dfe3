"""Queues of waiting requests: heaps, with which a plan costs the same for 100,000 requests as for ten."""

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any

from cbatch import PlanBuilder, Refusal, Request, View
from policies.chunking import ChunkSelector
from policies.sarathi_serve import SarathiServe


class WaitingQueue:
    """Requests by ascending key; ties: by arrival, then id. A policy pushes requests that begin to wait (`on_wait`)."""

    def __init__(self, key: Callable[[Request], Any]) -> None:
        """key: returns the key of a request at the next look after its push. Push a request again if its key has changed."""
        self.key = key
        self._new: dict[Request, None] = {}  # pushed since the latest look
        self._heap: list[tuple[Any, float, int, int, Request]] = []
        self._latest: dict[Request, int] = {}  # number of each request's latest entry; earlier entries do not count
        self._pushed = 0

    def push(self, *requests: Request) -> None:
        """Adds the requests that wait at the next look."""
        self._new |= dict.fromkeys(requests)

    def discard(self, request: Request) -> None:
        """Removes a request, if present."""
        self._new.pop(request, None)
        self._latest.pop(request, None)

    def in_order(self, view: View) -> Iterator[Request]:
        """Yields the waiting requests in order. Taking the next request removes the previous, which has been admitted."""
        if len(self._heap) > 2 * len(self._latest) + 64:  # most entries are outdated by later pushes
            self._heap = [entry for entry in self._heap if self._latest.get(entry[-1]) == entry[-2]]
            heapify(self._heap)
        self._enter(view)
        while self._heap:
            *_, number, request = self._heap[0]
            if self._latest.get(request) == number:
                if view.is_waiting(request):
                    yield request
                if self._latest[request] == number:
                    del self._latest[request]
            heappop(self._heap)
            self._enter(view)

    def _enter(self, view: View) -> None:
        for request in [request for request in self._new if view.is_waiting(request)]:
            self._pushed += 1
            self._latest[request] = self._pushed
            heappush(self._heap, (self.key(request), request.arrival_time, request.id, self._pushed, request))
        self._new.clear()

    def beside(self, running: Iterable[Request], plan: PlanBuilder, view: View) -> Iterator[Request]:
        """Yields running and waiting requests by key. Add each request to the plan before taking the next.

        A waiting request that is granted no tokens blocks the other waiting requests.
        """
        waiting = map(self._ranked, self.in_order(view))
        first = next(waiting, None)
        for ranked in (*sorted(map(self._ranked, running)), None):
            while first is not None and (ranked is None or first < ranked):
                yield first[-1]
                first = next(waiting, None) if plan.refusal is None else None
            if ranked is not None:
                yield ranked[-1]

    def add_by_preempting(
        self, request: Request, plan: PlanBuilder, view: View, num_tokens: int | None = None, *, reserve: int = 0
    ) -> bool:
        """Adds `num_tokens`, or all missing tokens, of a request. If blocks are short, preempts requests behind it, the last by key first.

        Returns False if no request is left to preempt. Preempts none if blocks that are about to become free suffice.
        """
        while (
            not plan.add(request, num_tokens=num_tokens, reserve=reserve, whole=True) and plan.refusal is Refusal.BLOCKS
        ):
            if plan.wait_for_blocks(request, request.num_ready):
                break
            taken, mine = {*plan.plan.requests, *plan.plan.preempt}, self._ranked(request)
            victims = [other for other in view.running if other not in taken and self._ranked(other) > mine]
            if not victims:
                return False
            plan.preempt(max(map(self._ranked, victims))[-1])
        return True

    def _ranked(self, request: Request) -> tuple[Any, float, int, Request]:
        return self.key(request), request.arrival_time, request.id, request


class RankedPrompts(SarathiServe):
    """Sarathi-Serve with waiting requests ordered by a key."""

    def __init__(self, chunking: ChunkSelector, key: Callable[[Request], Any]) -> None:
        super().__init__(chunking)
        self._queue = WaitingQueue(key)

    def on_wait(self, request: Request) -> None:
        self._queue.push(request)

    def prompts(self, view: View) -> Iterable[Request]:
        return chain(view.prefilling, self._queue.in_order(view))
