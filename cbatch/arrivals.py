"""Tracks which requests arrive next, the only way for requests to reach an engine, and whose clients leave next.

    engine --- due(now, iteration) --> the requests that have arrived by now
           --- next() ---------------> the time of the next arrival: until then the engine may idle, or leap over iterations
           --- wait(host, time) -----> there is nothing to compute before that time or the next arrival
           --- withdraw(request) ----> the request will not arrive: its client has left
           --- ended(request) -------> the request has ended: a request that follows it may become known

Times are seconds on the executor's clock.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX
from typing import Any, Protocol

from sortedcontainers import SortedKeyList

from cbatch.errors import StallError, WorkloadError
from cbatch.facts import Facts, facts_of
from cbatch.limits import Limits
from cbatch.request import Request, Status, leaves_at
from cbatch.request_spec import LATEST_ARRIVAL

_BETWEEN_LOOKS = 1e-3  # seconds between looks for messages while a pipeline computes


class Arrivals(Protocol):
    """The requests of a run in the order of their arrival.

    facts: what is known of all requests before the first one arrives. known: the requests known by then; the others follow one by one.
    num_unfinished: known requests that have not ended, arrived or not. The run ends when it is 0. num_ended: those that have.
    server_seconds: spent by a request in a server before the engine sees the request; part of its latencies.
    follow_ends: whether a request may arrive because another one has ended.
    all_known: whether the time of the next arrival is known until another request ends; otherwise one may arrive sooner.
    iterations: the earliest iteration of each request that arrives by iteration, by id, counted from 1; it arrives sooner if nothing
        is left to compute. All other requests arrive by time.
    """

    facts: Facts
    known: Sequence[Request] = ()
    num_unfinished: int = 0
    num_ended: int = 0
    server_seconds: float = 0.0
    follow_ends: bool = False
    all_known: bool = True
    iterations: Mapping[int, int] = {}

    def due(self, now: float, iteration: int | None) -> Sequence[Request]:
        """Takes out the requests that have arrived.

        iteration: number of the iteration to plan next. None: nothing is left to compute, so a request that waits for an
            iteration arrives at once.
        """

    def next(self) -> float:
        """Returns the time of the next arrival; infinity if none is known."""

    def wait(self, host: Any, time: float) -> None:
        """Waits until `time`, until the host can take a turn, or until an unexpected arrival or departure."""
        host.sleep_until(time)

    def withdraw(self, request: Request) -> None:
        """Takes out a request that has not arrived; raises WorkloadError if it is not known."""

    def ended(self, request: Request) -> None:
        """Notes that a request has ended."""
        self.num_unfinished -= 1
        self.num_ended += 1


class Departures:
    """The requests that have arrived and not ended, by the time at which their clients leave (`RequestSpec.timeout`).

    next_at: when the next client leaves; infinity if all stay.
    """

    def __init__(self) -> None:
        self.next_at = inf
        self._times: dict[Request, float] = {}
        self._by_time: SortedKeyList[Request, float] = SortedKeyList(key=self._times.__getitem__)

    def arrived(self, request: Request, now: float = 0.0) -> None:
        """now: seconds. A client that has left before counts from now: another engine may have just given the request a token."""
        if (at := max(leaves_at(request), now)) < inf:
            self._times[request] = at
            self._by_time.add(request)
            self._note_next()

    def ended(self, request: Request) -> None:
        if request in self._times:
            self._by_time.remove(request)
            del self._times[request]
            self._note_next()

    def _note_next(self) -> None:
        self.next_at = self._times[self._by_time[0]] if self._by_time else inf

    def due(self, now: float) -> list[Request]:
        """Returns the requests whose clients have left by now."""
        return list(self._by_time.irange_key(max_key=now))


class Listed(Arrivals):
    """Requests whose arrival times and iterations are known before the run, or that are added during the run.

    check: raises WorkloadError for a request that cannot be served; set by the host.
    """

    def __init__(self, requests: Sequence[Request] = (), iterations: Mapping[int, int] = {}) -> None:
        """Raises WorkloadError as `note_id`."""
        self.iterations = {id_: iteration for id_, iteration in iterations.items() if iteration}
        self._ids = set[int]()
        self._pending = list[tuple[float, int, int, Request]]()  # a heap by arrival, iteration and id
        self.known = requests
        self.check: Callable[[Request], object] = lambda request: None
        self.add(requests)

    @cached_property
    def facts(self) -> Facts:  # type: ignore[override]
        if self.iterations and any(request.arrival_time for request in self.known):
            problem = "some requests arrive by iteration and some by time, and the two have no common order"
            raise WorkloadError(f"workload: {problem}; give all requests one of the two")
        facts = facts_of(self.known)
        return replace(facts, number=None, is_open=True) if self.follow_ends else facts

    def add(self, requests: Sequence[Request]) -> None:
        """Raises WorkloadError as `note_id`, and as `check`."""
        for request in requests:
            self.check(request)
        for request in requests:
            note_id(request, self._ids)
            heappush(self._pending, (request.arrival_time, self.iterations.get(request.id, 0), request.id, request))
        self.num_unfinished += len(requests)

    def due(self, now: float, iteration: int | None) -> Sequence[Request]:
        arrived: list[Request] = []
        pending, late = self._pending, self.server_seconds
        while pending and pending[0][0] + late <= now and pending[0][1] <= (iteration or 0):
            arrived.append(heappop(pending)[3])
        if iteration is None and not arrived and pending and pending[0][0] + late <= now:
            arrived.append(heappop(pending)[3])
        return arrived

    def next(self) -> float:
        return self._pending[0][0] + self.server_seconds if self._pending else inf

    def withdraw(self, request: Request) -> None:
        pending = [entry for entry in self._pending if entry[3] is not request]
        if len(pending) == len(self._pending):
            raise not_submitted(request)
        heapify(pending)
        self._pending = pending


class Streamed(Listed):
    """Requests that are created one arrival ahead, so that few exist at any time."""

    def __init__(self, make: Callable[[], Iterable[Request]]) -> None:
        """
        make: returns new requests in the order of their arrival times; called once for the facts and once for the run.

        Raises WorkloadError: a request arrives before an earlier one, or has a known id; also raised by `due`.
        """
        super().__init__()
        self.make, self._latest = make, 0.0
        self._left: Iterator[Request] | None = None
        self.facts = facts_of(make())
        self.num_unfinished = self.facts.number or 0

    def due(self, now: float, iteration: int | None) -> Sequence[Request]:
        arrived: list[Request] = []
        while self.next() <= now:
            arrived.append(heappop(self._pending)[3])
            self._create()
        return arrived

    def next(self) -> float:
        if self._left is None:
            self._left = iter(self.make())
            self._create()
        return self._pending[0][0] + self.server_seconds if self._pending else inf

    def withdraw(self, request: Request) -> None:
        super().withdraw(request)
        self._create()

    def _create(self) -> None:
        for request in islice(self._left or (), 1):
            if request.arrival_time < self._latest:
                raise WorkloadError(f"request {request.id} is earlier than the one before; sort by arrival time")
            self._latest = request.arrival_time
            self.add([request])
            self.num_unfinished -= 1  # counted from the start


class Posted(Listed):
    """Requests that another thread posts during the run. Until the last message, their source counts as an unfinished request.

    messages: a request for each arrival, functions to call, and None after the last arrival.
    """

    def __init__(self, messages: "SimpleQueue[Any]", patience: float = inf) -> None:
        """patience: real seconds without a message after which StallError is raised, if posted requests have not ended."""
        super().__init__()
        self.messages, self._patience = messages, min(patience, TIMEOUT_MAX)
        self.num_unfinished, self._is_open, self.all_known = 1, True, False

    def receive(self, message: Any) -> None:
        """Takes in a message, on the thread that serves."""
        if callable(message):
            message()
        elif message is not None:
            self.add([message])
        elif self._is_open:
            self.num_unfinished, self._is_open = self.num_unfinished - 1, False

    def due(self, now: float, iteration: int | None) -> Sequence[Request]:
        while not self.messages.empty():
            self.receive(self.messages.get())
        return super().due(now, iteration)

    def next(self) -> float:
        return 0.0 if not self.messages.empty() else min(super().next(), LATEST_ARRIVAL if self._is_open else inf)

    def wait(self, host: Any, time: float) -> None:
        """Waits for a message, at most until `time` or until the host can take a turn."""
        while host.num_in_flight and host.next_at() == inf and self.messages.empty() and host.now() < time:
            host.sleep_until(min(time, host.now() + _BETWEEN_LOOKS))
        seconds = min(self.seconds_until(host, min(time, host.next_at())), self._patience)
        try:
            self.receive(self.messages.get(timeout=max(seconds, 0.0)))
        except Empty:
            if (number := self.num_unfinished - self._is_open) and seconds == self._patience:
                stuck = host.standstill(number)  # no StallError if they are on their way between engines
                held = isinstance(stuck, StallError)
                text = str(stuck) if held else f"the policy plans nothing with {number} requests"
                raise StallError(f"{text}; for {seconds:g} s so far: or raise patience.seconds") from None

    def seconds_until(self, host: Any, time: float) -> float:
        """Returns the real seconds from now until a time of the host."""
        return time - float(host.now())


def listed(requests: Arrivals | Iterable[Request]) -> Arrivals:
    """Returns requests as arrivals; a workload's sequence has `iterations`."""
    return Listed(list(requests), getattr(requests, "iterations", {})) if isinstance(requests, Iterable) else requests


def check_all(arrivals: Arrivals, check: Callable[[Request], object]) -> None:
    """Checks all known requests. If others follow, checks the longest ones now, and each of them when it is made."""
    if isinstance(arrivals, Streamed) or arrivals.follow_ends:
        check(arrivals.facts.longest)
        check(arrivals.facts.longest_prompt)
    for request in arrivals.known:
        check(request)
    if isinstance(arrivals, Streamed) or (isinstance(arrivals, Listed) and arrivals.follow_ends):
        arrivals.check = check  # only where requests are still to come, as it creates a reference cycle


def note_id(request: Request, known: set[int]) -> None:
    """Adds an id to the known ones; raises WorkloadError if it is there: two requests would share their tokens and figures."""
    if request.id in known:
        problem = f"request {request.id} is submitted twice, or two requests have this id"
        raise WorkloadError(f"{problem}; make a request with its own id for each")
    known.add(request.id)


def check_fits(request: Request, limits: Limits, num_kv_tokens: int, policy_name: str, num_at_once: int) -> None:
    """Raises WorkloadError for a request that exceeds positions, an iteration or the KV cache, or was submitted before.

    num_kv_tokens: size of the KV cache. num_at_once: tokens of the request that one iteration must hold (`Policy`).
    """
    if request.status is not Status.PENDING:
        raise WorkloadError(f"request {request.id} was submitted before; make a new one for each run")
    if request.max_tokens > limits.max_request_tokens:
        lengths = f"{request.num_prompt_tokens} prompt + {request.max_new_tokens} new tokens"
        fewer = "its sliding window, or the longest request that the workload announces, if less"
        exceeded = f"{lengths} exceed the {limits.max_request_tokens} positions of the model ({fewer})"
        shorter = "by a lower workload.max_new_tokens, fewer workload.turns, or workload.too_long=clip of a trace"
        remedy = f"choose another model, or shorten requests: {shorter}"
    elif num_at_once > limits.max_tokens:
        exceeded = f"{policy_name} may compute {num_at_once} tokens at once, max_tokens={limits.max_tokens}"
        remedy = "raise max_tokens, or use a policy that splits prompts"
    elif request.max_tokens - 1 > num_kv_tokens:  # its last token never enters the KV cache
        exceeded = f"{request.max_tokens - 1} tokens exceed the KV cache of {num_kv_tokens}"
        remedy = "raise kv_tokens or shorten the requests"
    else:
        return
    raise WorkloadError(f"request {request.id}: {exceeded}; {remedy}")


def not_submitted(request: Request) -> WorkloadError:
    return WorkloadError(f"request {request.id} cannot be cancelled: it was not submitted here")
