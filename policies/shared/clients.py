"""Waiting requests by client, and whose turn it is, for fair shares: by counters of service, in turn, or by arrival."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from heapq import heappop, heappush, heapreplace

from cbatch import ConfigError, Request

Client = str | None
Queue = OrderedDict[Request, None]  # the first is the oldest


class Arrival:
    """First come, first served. Also keeps the service that each client has received."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """weights: of clients by name; 1 for others."""
        self.counters: dict[Client, float] = {}
        self.weights = weights
        self._queue = Queue()

    def push(self, request: Request) -> None:
        self.counters.setdefault(request.client, 0.0)
        self._queue[request] = None

    def first(self) -> Request | None:
        """The request whose turn it is, if any waits."""
        return next(iter(self._queue), None)

    def take(self, request: Request, service: float) -> None:
        """Takes the `first` out, which is admitted, and charges its client."""
        self.discard(request)
        self.charge(request.client, service)

    def discard(self, request: Request) -> None:
        """Takes a request out, if it is in."""
        self._queue.pop(request, None)

    def charge(self, client: Client, service: float) -> None:
        """service: what a request of the client received; negative for a refund."""
        self.counters[client] += service / self.weights.get(client or "", 1.0)


class _ByClient(Arrival):
    """A queue for each client."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__(weights)
        self._waiting: defaultdict[Client, Queue] = defaultdict(Queue)

    def discard(self, request: Request) -> None:
        self._waiting[request.client].pop(request, None)


class LeastCounter(_ByClient):
    """The oldest request of the client that received least. Ties: the client that arrived first.

    A client that waits again after a pause is lifted to the least counter among those waiting, or to that of the client whose
    request left the queue last, so that a pause earns no credit (`lift`).
    """

    def __init__(self, weights: Mapping[str, float], lift: bool) -> None:
        super().__init__(weights)
        self.lift = lift
        self._order: dict[Client, int] = {}  # of arrival
        self._heap: list[tuple[float, int, Client]] = []  # of waiting clients, with counters that may have risen since
        self._left_last: Client = None

    def push(self, request: Request) -> None:
        client, queue = request.client, self._waiting[request.client]
        if not queue:
            least = self._least()
            floor = self.counters[least[0]] if least else self.counters.get(self._left_last, 0.0)
            counter = self.counters.get(client, 0.0)
            self.counters[client] = max(counter, floor) if self.lift else counter
            self._enter(client)
        queue[request] = None

    def first(self) -> Request | None:
        least = self._least()
        return next(iter(self._waiting[least[0]])) if least else None

    def take(self, request: Request, service: float) -> None:
        super().take(request, service)
        self._left_last = request.client

    def charge(self, client: Client, service: float) -> None:
        super().charge(client, service)
        if service < 0 and self._waiting[client]:
            self._enter(client)

    def _enter(self, client: Client) -> None:
        heappush(self._heap, (self.counters[client], self._order.setdefault(client, len(self._order)), client))

    def _least(self) -> list[Client]:
        """The waiting client with the least counter, if there is one."""
        while self._heap:
            counter, order, client = self._heap[0]
            if not self._waiting[client] or counter > self.counters[client]:  # left, or entered again after a refund
                heappop(self._heap)
            elif counter < self.counters[client]:
                heapreplace(self._heap, (self.counters[client], order, client))
            else:
                return [client]
        return []


class RoundRobin(_ByClient):
    """Deficit round robin: a client whose turn begins in debt receives a quantum of service, and keeps the turn until it is spent.

    counters: what is left of each client's quanta.
    """

    def __init__(self, weights: Mapping[str, float], quantum: float) -> None:
        super().__init__(weights)
        self.quantum = quantum
        self._active: deque[Client] = deque()  # the first has the turn; also clients in debt without waiting requests
        self._begun = False

    def push(self, request: Request) -> None:
        client = request.client
        self.counters.setdefault(client, 0.0)
        if client not in self._active:
            self._active.append(client)
        self._waiting[client][request] = None

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
    """Lets in a number of requests of each client per minute."""

    def __init__(self, most: int | None) -> None:
        """most: requests that are let in within 60 s; None: all."""
        if most is not None and most < 1:
            raise ConfigError(f"policy.rpm={most}: give at least 1 request per minute, or null for no limit")
        self.most = most
        self._let_in: defaultdict[Client, deque[float]] = defaultdict(deque)  # arrivals of the last 60 s

    def lets_in(self, request: Request) -> bool:
        """Asked once of each request, in the order of arrival."""
        if self.most is None:
            return True
        times = self._let_in[request.client]
        while times and request.arrival_time - times[0] > 60:
            times.popleft()
        let_in = len(times) < self.most
        if let_in:
            times.append(request.arrival_time)
        return let_in


def clients_by(order: str, weights: Mapping[str, float], lift: bool, quantum: float) -> Arrival:
    """The queue of one of the orders of `VTC`."""
    if order not in ("vtc", "mdrr", "fcfs") or not quantum > 0:
        raise ConfigError(f"policy: {order=} must be vtc, mdrr or fcfs, {quantum=} above 0")
    return {"vtc": LeastCounter(weights, lift), "mdrr": RoundRobin(weights, quantum), "fcfs": Arrival(weights)}[order]
