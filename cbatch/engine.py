"""An engine: serves the requests that are submitted to it, or that its arrivals bring. `turns` has its turns, `host` the loop."""

from collections.abc import Callable, Iterable
from math import inf

from cbatch.arrivals import Arrivals, Listed, check_all, check_fits
from cbatch.errors import PolicyError
from cbatch.host import advance, drive, uncollected
from cbatch.moves import Moved, end_leases, give, lend
from cbatch.record import RunRecord
from cbatch.request import FinishReason, Request, read_only
from cbatch.stall import standstill
from cbatch.turns import Turns


class Engine(Turns):
    """Serves requests with one policy on one executor.

    arrivals: the requests of `run`: those that are submitted, unless `attach` sets others before the run.
    """

    def check_fits(self, request: Request) -> None:
        """Raises WorkloadError for a request that cannot be served, or was submitted before."""
        num_at_once = self._call(self._num_at_once, request)
        check_fits(request, self.limits, self.state.pool.num_tokens, self.policy_name, num_at_once)
        if self.state.cache is not None:
            self.state.cache.check(request)

    @property
    def engines(self) -> list["Engine"]:
        """This engine; a `cluster.Cluster` has several."""
        return [self]

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests for their arrival times; raises WorkloadError as `check_fits` and `note_id`."""
        assert isinstance(self.arrivals, Listed), "an engine with other arrivals gets its requests from them"
        new = list(requests)
        for request in new:
            self.check_fits(request)
        self.arrivals.add(new)
        if self.state.cache is not None:
            self.state.cache.expect(new)

    def attach(self, arrivals: Arrivals) -> None:
        """Serves these requests from now on; raises WorkloadError as `check_fits` for one that is known already."""
        check_all(arrivals, self.check_fits)
        if self.state.cache is not None:  # whose eviction may look ahead
            self.state.cache.expect(arrivals.known)
        arrivals.server_seconds = self.arrivals.server_seconds
        self.arrivals = arrivals

    @property
    def num_unfinished(self) -> int:
        """Known requests that have not ended, arrived or not."""
        return self.arrivals.num_unfinished - len(self._ended)

    def give(self, request: Request, lease_seconds: float = inf) -> Moved:
        """Hands a request over that waits or runs here, between two turns: see `moves.give`. For its policy the request has ended."""
        now = self.now()
        moved = give(self.state, request, (launched.step for launched in self._in_flight), now, now + lease_seconds)
        self._latest = None
        self._waiting.wake()
        self._waiting.departures.ended(request)
        if moved.lease is not None:
            self.poke(moved.lease.until)
        if self.observer is not None:
            self.observer.left(request)
        self.arrivals.num_unfinished -= 1
        self._call(self._on_finish, request)
        return moved

    def lend(self, request: Request, lease_seconds: float = inf) -> Moved:
        """Lends cached blocks of an arriving request's prompt to another engine: see `moves.lend`."""
        now = self.now()
        moved = lend(self.state, request, now, now + lease_seconds)
        if moved.lease is not None:
            self.poke(moved.lease.until)
        return moved

    def offer(self, request: Request, moved: Moved, now: float) -> None:
        """Takes over a request from another engine: see `Inbox`."""
        self.arrivals.num_unfinished += 1
        self.inbox.offered.append((request, moved))
        self._waiting.departures.arrived(request, now)
        self.poke(now)

    def refuse(self, request: Request, reason: FinishReason, now: float, why: str = "") -> None:
        """Ends a request that does not arrive here: a router has rejected it, or its client has left. The next turn returns it."""
        self.state.end(request, reason, now, why)
        self._end(request, known=False)
        self.poke(now)

    def poke(self, at: float) -> None:
        """Makes the engine look at its leases and its inbox in the first turn after a time, for which it wakes."""
        self._waiting.poked_at = min(self._waiting.poked_at, at)

    def settle(self) -> None:
        """Frees what moved requests have left, after a run."""
        self.inbox.take(self.state, self.now())
        self._waiting.poked_at = end_leases(self.state, inf)

    def run(self, on_turn: Callable[["Engine"], object] = lambda engine: None) -> RunRecord:
        """Serves until every request has ended. `on_turn`, for progress bars, is called after each turn or leap."""
        with uncollected(self.executor.needs_tokens):
            drive(self, self.arrivals, on_turn)
        self.settle()
        assert self.state.pool.num_used == 0, "every KV block is free when nothing runs"
        return self.record

    def take(self) -> RunRecord:
        """See `RunRecord.take`."""
        return self.record.take()

    @property
    def is_idle(self) -> bool:
        """Whether no request is here, or on its way, no lease holds blocks, no iteration is in flight, and no poke is due."""
        state, waiting = self.state, self._waiting
        is_empty = not (self._in_flight or waiting.arrived or state.waiting or state.running or waiting.poked_at < inf)
        return is_empty and self.inbox.is_empty and not state.leases

    def restart(self) -> None:
        """Empties the prefix cache, as on a machine that has just started."""
        if self.state.cache is not None:
            self.state.cache.pool.clear()
            if self.observer is not None:
                self.observer.changed(self.now(), self.state.pool.num_used)

    def step(self) -> None:
        """Takes one turn, without a leap."""
        leaps, self.leaps = self.leaps, False
        advance(self, self.arrivals)
        self.leaps = leaps

    # -- the host of `drive` ------------------------------------------------------------------------------------------

    iteration: int = read_only("state.iteration")

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def now(self) -> float:
        return self.executor.now()

    def next_at(self) -> float:
        ready_at = self.executor.ready_at()  # in real time this takes a while
        return max(self._waiting.next_at(), ready_at)

    def arrive(self, request: Request, now: float) -> None:
        self._waiting.arrive(request, now)

    def sleep_until(self, time: float) -> None:
        self._waiting.sleep_until(time)

    def standstill(self, num_unfinished: int) -> PolicyError:
        return standstill(self._where(), self.view, self._empty_plan, num_unfinished)
