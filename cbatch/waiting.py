"""What an engine waits for after an empty plan: an arrival, a departure, the plan's `wake_at`, or the oldest iteration in flight."""

from collections.abc import Sequence
from math import inf

from cbatch.arrivals import Departures
from cbatch.executor import Executor
from cbatch.record import InFlight
from cbatch.request import Request

_BETWEEN_LOOKS = 1e-4  # seconds between looks at an iteration of a real pipeline


class Waiting:
    """The requests that have arrived since the latest plan, and the sleep of an engine whose latest plan was empty.

    poked_at: seconds; when something else may have changed, such as a move (`moves`).
    asleep: nothing has changed since the empty plan. since: when the host began to wait for the oldest iteration; None: it does not.
    """

    def __init__(self, executor: Executor, in_flight: Sequence[InFlight]) -> None:
        """in_flight: the engine's, oldest first."""
        self.arrived: list[Request] = []
        self.departures = Departures()
        self.poked_at = inf
        self.asleep = False
        self.since: float | None = None
        self._executor, self._in_flight = executor, in_flight
        self._wake_at = inf  # seconds: the plan's
        self._arrived_at = inf  # seconds: of the first request in `arrived`

    def arrive(self, request: Request, now: float) -> None:
        if not self.arrived:
            self._arrived_at = now
        self.arrived.append(request)

    def fall_asleep(self, wake_at: float = inf) -> None:
        """Sleeps until `wake_at` at the latest; with iterations in flight, until the oldest one has ended."""
        self.asleep, self._wake_at = True, wake_at
        self.since = self._executor.now() if self._in_flight else None

    def wake(self) -> None:
        self.asleep, self.since = False, None

    def next_at(self) -> float:
        """Returns when the engine takes its next turn: see `Host.next_at`."""
        now = self._executor.now()
        if not self.asleep:
            return now
        at = self._executor.ends_at(self._in_flight[0].handle) if self._in_flight else self._wake_at
        return max(min(at, self._arrived_at if self.arrived else inf, self.change_at), now)

    @property
    def change_at(self) -> float:
        """Returns when a departure or a poke is due."""
        return min(self.departures.next_at, self.poked_at)

    def is_for_oldest(self) -> bool:
        """Whether the engine sleeps until its oldest iteration has ended, and nothing else has woken it."""
        awoken = bool(self.arrived) or self.change_at <= self._executor.now()
        return self.asleep and bool(self._in_flight) and not awoken

    def sleep_until(self, time: float) -> None:
        """Waits until `time`, or until the oldest iteration in flight has ended and the latest one has been launched."""
        executor = self._executor
        if self._in_flight:  # in a real pipeline, their ends are not known beforehand
            oldest = self._in_flight[0].handle
            while (now := executor.now()) < time and executor.ends_at(oldest) == inf:
                executor.sleep_until(min(time, now + _BETWEEN_LOOKS))
            time = min(time, max(executor.ends_at(oldest), executor.ready_at()))
        executor.sleep_until(time)
