"""Orders waiting requests by client for fair shares: by counters of service, in turn, or by arrival."""

from collections import defaultdict, deque
from collections.abc import Mapping
from heapq import heappop, heappush, heapreplace
from operator import attrgetter

from sortedcontainers import SortedKeyList

from cbatch import ConfigError, Request

Client = str | None


def oldest_first() -> "SortedKeyList[Request, tuple[float, int]]":
    return SortedKeyList(key=attrgetter("arrival_time", "id"))


class Arrival:
    """Serves requests first come, first served. Also counts the service that each client has received."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """weights: weights of clients by name; default 1."""
        self.counters = defaultdict[Client, float](float)
        self.weights = weights
        self._queue = oldest_first()

    def push(self, request: Request, again: bool = False) -> None:
        """Adds a request that waits. again: it was taken before."""
        self.discard(request)
        self._queue_of(request).add(request)

    def first(self) -> Request | None:
        """Returns the request whose turn it is, or None."""
        return next(iter(self._queue), None)

    def take(self, request: Request) -> None:
        """Removes a request that is admitted."""
        self.discard(request)

    def discard(self, request: Request) -> None:
        """Removes a request, if present."""
        self._queue_of(request).discard(request)

    def _queue_of(self, request: Request) -> "SortedKeyList[Request, tuple[float, int]]":
        return self._queue

    def charge(self, client: Client, service: float) -> None:
        """Adds service to a client's counter. service: negative for a refund."""
        self.counters[client] += service / self.weights.get(client or "", 1.0)


class _ByClient(Arrival):
    """Keeps one queue per client."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__(weights)
        self._waiting = defaultdict[Client, "SortedKeyList[Request, tuple[float, int]]"](oldest_first)

    def _queue_of(self, request: Request) -> "SortedKeyList[Request, tuple[float, int]]":
        return self._waiting[request.client]


class LeastCounter(_ByClient):
    """Serves the oldest request of the client that received least. Ties: the client that arrived first.

    A client that waits again after a pause is lifted to the least counter among waiting clients or, if no client waits, to the
    counter of the client whose request left the queue last, so that a pause earns no credit (`lift`).
    """

    def __init__(self, weights: Mapping[str, float], lift: bool) -> None:
        super().__init__(weights)
        self.lift = lift
        self._order: dict[Client, int] = {}  # order of arrival
        self._heap: list[tuple[float, int, Client]] = []  # waiting clients; their counters may have risen since
        self._left_last: Client = None

    def push(self, request: Request, again: bool = False) -> None:
        client = request.client
        if not self._waiting[client]:
            least = self._least()
            floor = self.counters[least[0]] if least else self.counters.get(self._left_last, 0.0)
            if self.lift and not again:
                self.counters[client] = max(self.counters[client], floor)
            self._enter(client)
        super().push(request)

    def first(self) -> Request | None:
        least = self._least()
        return next(iter(self._waiting[least[0]])) if least else None

    def take(self, request: Request) -> None:
        super().take(request)
        self._left_last = request.client

    def charge(self, client: Client, service: float) -> None:
        super().charge(client, service)
        if service < 0 and self._waiting[client]:
            self._enter(client)

    def _enter(self, client: Client) -> None:
        heappush(self._heap, (self.counters[client], self._order.setdefault(client, len(self._order)), client))

    def _least(self) -> list[Client]:
        """Returns the waiting client with the least counter in a list, or an empty list."""
        while self._heap:
            counter, order, client = self._heap[0]
            if not self._waiting[client] or counter > self.counters[client]:  # left, or re-entered after a refund
                heappop(self._heap)
            elif counter < self.counters[client]:
                heapreplace(self._heap, (self.counters[client], order, client))
            else:
                return [client]
        return []


class RoundRobin(_ByClient):
    """Deficit round robin: a client whose turn begins without credit receives a quantum of service, and keeps the turn until it is spent.

    counters: each client's remaining service.
    """

    def __init__(self, weights: Mapping[str, float], quantum: float) -> None:
        super().__init__(weights)
        self.quantum = quantum
        self._active: deque[Client] = deque()  # the first has the turn; some may have debts but no requests
        self._begun = False

    def push(self, request: Request, again: bool = False) -> None:
        if request.client not in self._active:
            self._active.append(request.client)
        super().push(request)

    def first(self) -> Request | None:
        while self._active:
            client = self._active[0]
            if not self._begun and self.counters[client] <= 0:
                self.counters[client] += self.quantum
            self._begun = self.counters[client] > 0 and bool(self._waiting[client])
            if self._begun:
                return next(iter(self._waiting[client]))
            self._active.popleft()
            if self._waiting[client] or self.counters[client] < 0:
                self._active.append(client)
        return None

    def charge(self, client: Client, service: float) -> None:
        super().charge(client, -service)


class RateLimit:
    """Accepts a limited number of requests per client and minute."""

    def __init__(self, most: int | None) -> None:
        """most: requests accepted within 60 s; None: all."""
        if most is not None and most < 1:
            raise ConfigError(f"policy.rpm={most}: give at least 1 request per minute, or null for no limit")
        self.most = most
        self._accepted: defaultdict[Client, deque[float]] = defaultdict(deque)  # arrivals of the last 60 s

    def accepts(self, request: Request) -> bool:
        """Returns whether a request is accepted. Call once per request, in the order of arrival."""
        if self.most is None:
            return True
        times = self._accepted[request.client]
        while times and request.arrival_time - times[0] > 60:
            times.popleft()
        is_accepted = len(times) < self.most
        if is_accepted:
            times.append(request.arrival_time)
        return is_accepted


def clients_by(order: str, weights: Mapping[str, float], lift: bool, quantum: float) -> Arrival:
    """Returns the queue for an order of `VTC`."""
    if order not in ("vtc", "mdrr", "fcfs") or not quantum > 0:
        raise ConfigError(f"policy: {order=} must be vtc, mdrr or fcfs, {quantum=} above 0")
    return {"vtc": LeastCounter(weights, lift), "mdrr": RoundRobin(weights, quantum), "fcfs": Arrival(weights)}[order]
