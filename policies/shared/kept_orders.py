"""Orders of waiting requests that persist from plan to plan: a plan places only requests that have changed."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter

from cbatch import Name, Request, View
from policies.shared.waiting import WaitingQueue


class KeptOrder(ABC):
    """Waiting requests in an order. The owner calls `expect` on arrival and preemption, and `discard` on admission and end."""

    def __init__(self) -> None:
        self._expected: dict[Request, None] = {}  # to be placed

    def expect(self, requests: Iterable[Request]) -> None:
        self._expected |= dict.fromkeys(requests)

    def in_order(self, view: View) -> Iterator[Request]:
        """Applies changes since the last call. Returns the waiting requests in order; taking the next request admits the previous."""
        names = view.kv.changed_names()
        requests = {*(view.waiting if names is None else self._expected), *self._affected(names or (), view)}
        for request in filter(view.is_waiting, requests):
            self._place(request, view)
        # the missing tokens of a preempted request may change as long as its tokens are in flight
        self._expected = {request: None for request in self._expected if view.is_in_flight(request)}
        return self._ordered(view)

    @abstractmethod
    def discard(self, requests: Iterable[Request]) -> None:
        """Removes requests, if present."""

    @abstractmethod
    def _place(self, request: Request, view: View) -> None:
        """Places a request, which may already be present."""

    @abstractmethod
    def _affected(self, names: Iterable[Name], view: View) -> Iterable[Request]:
        """Returns the requests to place again after these names have entered or left the prefix cache."""

    @abstractmethod
    def _ordered(self, view: View) -> Iterator[Request]: ...


class FewestUncached(KeptOrder):
    """Fewest uncached tokens first; ties: arrival.

    The cache holds a name only together with all preceding names. A request's cached tokens therefore change only if its last cached
    name leaves, or if the next name enters.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue = WaitingQueue(attrgetter("num_ready"))
        self._watchers: defaultdict[Name, set[Request]] = defaultdict(set)

    def discard(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._queue.discard(request)

    def _place(self, request: Request, view: View) -> None:
        number = request.num_computed // view.kv.block_size
        for name in view.kv.prefix_names(request, number + 1)[max(number - 1, 0) :]:
            self._watchers[name].add(request)
        self._queue.push(request)

    def _affected(self, names: Iterable[Name], view: View) -> Iterable[Request]:
        return chain.from_iterable(self._watchers.pop(name, ()) for name in names)

    def _ordered(self, view: View) -> Iterator[Request]:
        return self._queue.in_order(view)
