"""Streams that run on the host's thread, in a random order among all those that streams and events allow.

Threads show few of the orders that a device may choose, and not reproducibly. Here an adversary chooses: the host and
the streams are ranked, the highest that need not wait goes on, and the ranking changes at random moments (probabilistic
concurrency testing, Burckhardt et al., ASPLOS 2010). A missing wait then shows as wrong tokens. The same random numbers
give the same order, and a failing order that hypothesis found shrinks, because zeros change nothing: every operation
then runs as soon as it is enqueued. What an operation raises is raised in the host's call.
"""

import time
from collections import deque
from random import Random
from typing import NamedTuple

from cbatch.runtime.streams import Operation, Streams, stream_names


def any_order(random: Random, num_stages: int = 1, every: int = 8) -> Streams:
    """An executor's streams in an order drawn from `random`.

    every: steps of streams and calls of the host, on average, from one change of the ranking to the next; 0 for no
        changes: every operation then runs at once.
    """
    order = Order(random, every)
    streams = [AnyOrderStream(name, order) for name in stream_names(num_stages)]
    for _ in streams if every else ():
        order.change()
    return Streams.of(streams)


class Record:
    """A point in a stream's work. time: when the stream got there."""

    time: float | None = None


class Wait(NamedTuple):
    """The stream goes no further before the record is reached."""

    record: Record


class Order:
    """Decides which agent goes on: the host or one of the streams."""

    def __init__(self, random: Random, every: int) -> None:
        self._random, self._every = random, every
        self._host = object()
        self._ranking: list[object] = [self._host]  # highest first

    def add(self, stream: "AnyOrderStream") -> None:
        """Streams rank in the order in which they are added, the host after all of them, until that changes."""
        self._ranking.insert(-1, stream)

    def let_others_go(self) -> None:
        """The host has made a call: streams that rank above it go as far as they can."""
        while (agent := self._highest(host_waits=False)) is not None:
            agent.go()

    def reach(self, record: Record) -> None:
        """The host waits: streams go until one has reached the record."""
        while record.time is None:
            agent = self._highest(host_waits=True)
            assert agent is not None, "the host waits for an event that no stream will reach"
            agent.go()

    def change(self) -> None:
        """Move a randomly chosen agent to the top of the ranking."""
        self._ranking.insert(0, self._ranking.pop(self._random.randrange(len(self._ranking))))

    def _highest(self, *, host_waits: bool) -> "AnyOrderStream | None":
        """The highest-ranked stream that can go on; None if the host ranks above it or no stream can."""
        if self._every and self._random.randrange(self._every) == self._every - 1:
            self.change()
        for agent in self._ranking:
            if agent is self._host and not host_waits:
                return None
            if isinstance(agent, AnyOrderStream) and agent.can_go:
                return agent
        return None


class AnyOrderEvent:
    """An event of `AnyOrderStream`s."""

    def __init__(self, order: Order) -> None:
        self.latest: Record | None = None
        self._order = order

    def synchronize(self) -> None:
        self._order.let_others_go()
        if self.latest is not None:
            self._order.reach(self.latest)

    def is_reached(self) -> bool:
        self._order.let_others_go()
        return self.latest is None or self.latest.time is not None

    def time(self) -> float:
        assert self.latest is not None and self.latest.time is not None, "only an event that was reached has a time"
        return self.latest.time


class AnyOrderStream:
    """A stream that goes on when its `Order` says so."""

    def __init__(self, name: str, order: Order) -> None:
        self.name = name
        self._order = order
        self._queue: deque[Operation | Record | Wait] = deque()
        order.add(self)

    def event(self) -> AnyOrderEvent:
        return AnyOrderEvent(self._order)

    def run(self, operation: Operation) -> None:
        self._enqueue(operation)

    def record(self, event: AnyOrderEvent) -> None:
        event.latest = Record()
        self._enqueue(event.latest)

    def wait(self, event: AnyOrderEvent) -> None:
        if event.latest is not None:
            self._enqueue(Wait(event.latest))

    def close(self) -> None:
        self._queue.clear()

    @property
    def can_go(self) -> bool:
        first = self._queue[0] if self._queue else None
        return first is not None and (not isinstance(first, Wait) or first.record.time is not None)

    def go(self) -> None:
        """Process the next item of the queue."""
        match self._queue.popleft():
            case Record() as record:
                record.time = time.perf_counter()
            case Wait():
                pass
            case operation:
                operation()

    def _enqueue(self, item: Operation | Record | Wait) -> None:
        self._queue.append(item)
        self._order.let_others_go()
