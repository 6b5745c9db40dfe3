"""Orders of waiting requests that are kept from plan to plan: a plan places only requests for which something has changed."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter

from cbatch import Name, Request, View
from policies.shared.waiting import WaitingQueue


class KeptOrder(ABC):
    """Waiting requests in an order. Its owner tells who arrives or is preempted (`expect`), and who is admitted or ends (`discard`)."""

    def __init__(self) -> None:
        self._expected: dict[Request, None] = {}  # to be placed

    def expect(self, requests: Iterable[Request]) -> None:
        self._expected |= dict.fromkeys(requests)

    def in_order(self, view: View) -> Iterator[Request]:
        """Follows what has changed since the last call; returns the waiting requests in order. Asking for the next admits the last."""
        names = view.kv.changed_names()
        requests = {*(view.waiting if names is None else self._expected), *self._affected(names or (), view)}
        for request in filter(view.is_waiting, requests):
            self._place(request, view)
        # what a preempted request lacks may change until none of its tokens is in flight
        self._expected = {request: None for request in self._expected if view.is_in_flight(request)}
        return self._ordered(view)

    @abstractmethod
    def discard(self, requests: Iterable[Request]) -> None:
        """Takes requests out, if they are in."""

    @abstractmethod
    def _place(self, request: Request, view: View) -> None:
        """Places a request, which may be in already."""

    @abstractmethod
    def _affected(self, names: Iterable[Name], view: View) -> Iterable[Request]:
        """Returns the requests to place again when these names have entered or left the prefix cache."""

    @abstractmethod
    def _ordered(self, view: View) -> Iterator[Request]: ...


class FewestUncached(KeptOrder):
    """Fewest uncached tokens first; ties: arrival.

    The cache holds a name only with all names before: what it holds of a request changes only if the last name that it holds
    leaves, or the next one enters.
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
