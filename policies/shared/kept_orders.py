"""Orders of waiting requests that persist from plan to plan: a plan places only requests that have changed."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from cbatch import BlockHash, Request, View
from policies.shared.prefixes import num_uncached
from policies.shared.waiting import WaitingQueue


class KeptOrder(ABC):
    """Waiting requests in an order. The owner calls `expect` when a request begins to wait, and `discard` on admission and end."""

    def __init__(self) -> None:
        self._expected: dict[Request, None] = {}  # to be placed

    def expect(self, requests: Iterable[Request]) -> None:
        self._expected |= dict.fromkeys(requests)

    def in_order(self, view: View) -> Iterator[Request]:
        """Applies changes since the last call. Returns the waiting requests in order; taking the next request admits the previous."""
        hashes = view.kv.changed_hashes()
        requests = {*(view.waiting if hashes is None else self._expected), *self._affected(hashes or (), view)}
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
    def _affected(self, hashes: Iterable[BlockHash], view: View) -> Iterable[Request]:
        """Returns the requests to place again after these hashes have entered or left the prefix cache."""

    @abstractmethod
    def _ordered(self, view: View) -> Iterator[Request]: ...


class FewestUncached(KeptOrder):
    """Fewest uncached tokens first; ties: arrival.

    The cache holds a hash only together with all preceding hashes. A request's cached tokens therefore change only if its last cached
    hash leaves, or if the next hash enters.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue = WaitingQueue(num_uncached)
        self._watchers: defaultdict[BlockHash, set[Request]] = defaultdict(set)
        self._watched: dict[Request, Sequence[BlockHash]] = {}

    def discard(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._queue.discard(request)
            for block_hash in self._watched.pop(request, ()):
                self._watchers[block_hash].discard(request)
                if not self._watchers[block_hash]:
                    del self._watchers[block_hash]

    def _place(self, request: Request, view: View) -> None:
        self.discard([request])
        number = request.num_computed // view.kv.block_size
        self._watched[request] = view.kv.block_hashes(request, number + 1)[max(number - 1, 0) :]
        for block_hash in self._watched[request]:
            self._watchers[block_hash].add(request)
        self._queue.push(request)

    def _affected(self, hashes: Iterable[BlockHash], view: View) -> Iterable[Request]:
        return chain.from_iterable(self._watchers.pop(block_hash, ()) for block_hash in hashes)

    def _ordered(self, view: View) -> Iterator[Request]:
        return self._queue.in_order(view)
