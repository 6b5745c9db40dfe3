"""Replicas behind a router: the host of several engines, each with its own policy, limits and KV cache.

Simulated, the replica with the earliest turn takes it, so that time never runs back. A request is routed when it arrives, from
what replicas have reported by then (`views`). Where time is real, replicas serve at the same time: `live`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import repeat, starmap
from math import inf
from typing import Any

from cbatch.arrivals import Arrivals, Listed, check_all
from cbatch.cluster.merging import Executors, Merger
from cbatch.cluster.reporter import Reporter
from cbatch.cluster.routers import CheckedRouter, PoolRouters, Reject, Route, Router
from cbatch.cluster.scaling import Fleet, Scaling
from cbatch.cluster.transfers import Moves, Transfers
from cbatch.cluster.views import ClusterView, ReplicaView, Role
from cbatch.engine import Engine
from cbatch.errors import PolicyError, StallError, WorkloadError
from cbatch.host import drive
from cbatch.record import RunRecord
from cbatch.request import FinishReason, Request, spec_of


class Cluster:
    """Engines behind a router; serves the arrivals attached to it, as one `Engine` does.

    arrivals: the requests of `run`, as for an `Engine`. pools: the name of each replica's pool.
    """

    iteration = 0  # replicas count their own

    def __init__(
        self,
        engines: Sequence[Engine],
        router: Router,
        pools: Sequence[str] = (),
        staleness: float = 0.0,
        scaling: Scaling | None = None,
        prices: Sequence[float | None] = (),
        roles: Sequence[Role] = (),
        moves: Moves | None = None,
    ) -> None:
        """staleness: see `ClusterView`. scaling: None: all replicas are always there. prices, roles: see `ReplicaView`.

        moves: None: requests stay where they were sent.
        """
        self.engines, self.router = list(engines), router
        self.pools = list(pools) or [""] * len(self.engines)
        self.executor = Executors([engine.executor for engine in engines])
        self.arrivals: Arrivals = Listed()
        self.arrivals.server_seconds = engines[0].arrivals.server_seconds
        self.record = RunRecord()
        self.replica_of: dict[int, int] = {}  # by the request's id
        self.prefilled_on: dict[int, int] = {}  # the replicas that moved requests have left
        self._merger = Merger(self.replica_of, self.pools)
        each = zip(self.engines, self.pools, prices or repeat(None), roles or repeat(Role.BOTH), strict=False)
        self._views = list(starmap(_view_of, each))
        self.roles = [view.role for view in self._views]
        for engine, view in zip(self.engines, self._views, strict=True):
            engine.observer = Reporter(engine, view)
        each_view = zip(self.engines, self._views, strict=True)
        kinds = [(each.policy_name, each.limits, each.state.pool.num_tokens, view.role) for each, view in each_view]
        self._firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]  # of replicas that serve the same requests
        self._view = ClusterView(self._views, staleness)
        self._router = CheckedRouter(router, self._view, moves is not None)
        self._rejected: dict[int, str] = {}  # reasons, by id
        self._now = 0.0
        self._turns = [(0.0, replica) for replica in range(len(self.engines))]  # a heap; some are out of date
        self._turns.append((inf, -1))
        self._due = [0.0] * len(self.engines) + [inf]  # the next turns; the last ends the heap
        self._view.least = scaling.least if scaling else 1
        parts = self._view, self._router.look, self._idle_at, self._restart
        self.fleet = None if scaling is None else Fleet(scaling, *parts)
        self.transfers: Transfers | None = None
        if moves is not None:
            for engine, pool in zip(self.engines, self.pools, strict=True):
                own = router.of_pools.get(pool, router.router) if isinstance(router, PoolRouters) else router
                engine.inbox.accepts = getattr(own, "accepts", engine.inbox.accepts)
            self._attach_moves(moves)

    def _attach_moves(self, moves: Moves) -> None:
        self.transfers = Transfers(moves, self.engines, self._decoder_of, self._schedule)

    def attach(self, arrivals: Arrivals) -> None:
        """As `Engine.attach`; refuses arrivals by iteration."""
        if arrivals.iterations:
            raise WorkloadError("requests arrive by iteration, which several replicas do not share; give arrival times")
        check_all(arrivals, self.check_fits)
        arrivals.server_seconds = self.arrivals.server_seconds
        self.arrivals = arrivals

    def check_fits(self, request: Request) -> None:
        """Raises WorkloadError for a request that no replica can serve, or whose prompt none can compute."""
        has_prefillers = any(view.role is Role.PREFILL for view in self._views)
        for stage in (Role.DECODE, Role.PREFILL) if has_prefillers else (Role.DECODE,):
            firsts = [first for first in self._firsts if self._views[first].role in (Role.BOTH, stage)]
            able = [first for first in firsts if self._views[first].fits(request)]
            for first in able or firsts[:1]:
                part = _prompt_of(request) if self._views[first].role is Role.PREFILL else request
                try:
                    self.engines[first].check_fits(part)
                except WorkloadError as error:
                    error.args = (f"pool {pool}: {error}" if (pool := self.pools[first]) else str(error),)
                    raise

    @property
    def num_unfinished(self) -> int:
        """Known requests that have not ended, arrived or not."""
        return self.arrivals.num_unfinished

    def run(self, on_turn: Callable[[Any], object] = lambda cluster: None) -> RunRecord:
        """Serves until every request has ended. `on_turn`, for progress bars, is called after each turn or leap of a replica."""
        drive(self, self.arrivals, on_turn)
        if self.fleet is not None:
            self.fleet.advance(self.executor.now())
        self.settle()
        self.record = self.merge()
        return self.record

    def settle(self) -> None:
        """Ends the transfers that are left after a run."""
        if self.transfers is not None:
            self.transfers.settle()
        for engine in self.engines:
            engine.settle()
        assert not any(engine.state.pool.num_used for engine in self.engines), "every KV block is free at the end"

    def merge(self) -> RunRecord:
        """Returns one record of all replicas."""
        return self._with_lives(Merger(self.replica_of, self.pools).merge(engine.record for engine in self.engines))

    def take(self) -> RunRecord:
        """As `RunRecord.take`, what has ended before the next turn or arrival."""
        goes_on = self.num_unfinished or self.num_in_flight
        before = min(self.next_at(), self.arrivals.next()) if goes_on else inf
        return self._with_lives(self._merger.merge([engine.record.take() for engine in self.engines], before))

    def _with_lives(self, record: RunRecord) -> RunRecord:
        record.lives = () if self.fleet is None else self.fleet.lives
        if self.transfers is not None:
            record.transfers, record.lost = self.transfers.done, self.transfers.lost
            record.prefilled_on = self.prefilled_on
        return record

    # -- the host of `drive` ------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Those of the first replica that has any: of hundreds of replicas, a sum for each request takes too long."""
        return next((number for engine in self.engines if (number := engine.num_in_flight)), 0)

    def now(self) -> float:
        return self._now

    def next_at(self) -> float:
        turns, due = self._turns, self._due
        while (first := turns[0])[0] != due[first[1]]:
            heappop(turns)
        return first[0] if self.transfers is None else min(first[0], self.transfers.next_at)

    def arrive(self, request: Request, now: float) -> None:
        """Routes a request."""
        if self.transfers is not None:
            self.transfers.advance(now)
        route = self.route(request, now)
        replica = route.prefill
        if why := self._rejected.pop(request.id, ""):
            self.engines[replica].refuse(request, FinishReason.REJECTED, now, why)
            self._schedule(replica)
            return
        if self.transfers is not None:
            self.transfers.send(request, route, now)
            return
        self.engines[replica].arrive(request, now)
        self._schedule(replica)

    def sleep_until(self, time: float) -> None:
        self._now = max(self._now, time)

    def turn(self, until: float) -> Sequence[Request]:
        """Takes the turn of the replica that is due first; another replica's turn ends a leap if new arrivals may follow from it."""
        if self.transfers is not None and self.transfers.next_at <= (at := self.next_at()):
            self._now = at
            self.transfers.advance(at)
            return ()
        self._now, replica = heappop(self._turns)
        if self.fleet is not None:
            self.fleet.advance(self._now)
        self._due[replica] = -inf
        if self.arrivals.follow_ends or self.transfers is not None:
            until = min(until, self.next_at())
        ended = self.engines[replica].turn(until)
        if self.transfers is not None:
            for request in ended:
                self.transfers.ended(request, replica)
        self._schedule(replica)
        if self.fleet is not None:
            self.fleet.note_idle(replica)
        return ended

    def standstill(self, num_unfinished: int) -> PolicyError:
        receiver = next((i for i, each in enumerate(self.engines) if not each.inbox.is_empty), None)
        if receiver is not None and not any(each.state.running for each in self.engines):  # no policy is at fault
            problem = f"replica {receiver} never has room for a request that it is to continue, and nothing else is"
            pushed = self.transfers is not None and self.transfers.push  # then no lease begins
            lease = "" if pushed else "give backend.transfers.lease=30, "
            remedy = f"raise kv_tokens, {lease}or let the router accept it"
            return StallError(f"{problem} left to do: {num_unfinished} requests have not ended; {remedy}")
        stuck = max(self.engines, key=lambda each: (bool(each.state.running), bool(each.state.waiting)))
        return stuck.standstill(num_unfinished)

    def _schedule(self, replica: int) -> None:
        if (at := self.engines[replica].next_at()) != self._due[replica]:
            self._due[replica] = at
            if at < inf:
                heappush(self._turns, (at, replica))

    def route(self, request: Request, now: float) -> Route:
        """Returns the replicas that the router chooses; a decoder of -1 is chosen later, in `_decoder_of`."""
        shown = _shown(request)
        if self.fleet is not None:
            self.fleet.advance(now)
        route = self._router.choose(shown, now)
        self._view.num_arrived += 1
        if isinstance(route, Reject):  # no replica counts it; the first one reports its end
            self._rejected[request.id] = route.reason or "rejected"
            return Route(*self._view.fitting(shown)[:1] * 2)
        prefill, decode, copy = route if isinstance(route, Route) else Route(route, route)
        self._views[prefill].send(shown)
        self.replica_of[request.id] = prefill
        if not isinstance(route, Route) and self._views[prefill].role is Role.PREFILL:
            decode = -1
            if self.transfers is not None and self.transfers.push:
                decode = self._router.choose_decoder(shown, now)
        if decode not in (-1, prefill):
            self._view.bind(shown, decode)
        return Route(prefill, decode, copy)

    def _decoder_of(self, request: Request, decoder: int, now: float) -> int:
        """Returns the replica that continues a request; `decoder`, unless that is -1."""
        if self.fleet is not None:
            self.fleet.advance(now)
        if decoder < 0:
            decoder = self._router.choose_decoder(shown := _shown(request), now)
            self._views[decoder].send(shown, request.num_prompt_tokens)
        self._view.unbind(request)
        self.prefilled_on[request.id], self.replica_of[request.id] = self.replica_of[request.id], decoder
        return decoder

    def _idle_at(self, replica: int) -> float:
        engine, transfers = self.engines[replica], self.transfers
        is_idle = engine.is_idle and not (transfers is not None and transfers.expects(replica))
        return engine.now() if is_idle else inf

    def _restart(self, replica: int) -> None:
        self.engines[replica].restart()


def _view_of(engine: Engine, pool: str, price: float | None, role: Role) -> ReplicaView:
    size = engine.state.pool
    return ReplicaView(pool, size.num_blocks, size.block_size, engine.limits, engine.view.cost, price, role)


def _shown(request: Request) -> Request:
    return Request.from_spec(spec_of(request))


def _prompt_of(request: Request) -> Request:
    """Returns what a replica that only prefills serves: the prompt and the first token."""
    return Request.from_spec(replace(spec_of(request), max_new_tokens=1))
