"""Replicas in real time: each engine serves on a thread of its own, and the thread that calls `run` routes arrivals.

router     sleeps until t1 | routes the arrivals at t1, posts them to replicas | sleeps until t2, or until a request has ended
replica    plans, computes, posts reports and ended requests | takes the posted requests into its next plan | ...
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import permutations
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from cbatch.arrivals import Posted
from cbatch.cluster.cluster import Cluster
from cbatch.cluster.transfers import Moves
from cbatch.cluster.views import Role
from cbatch.engine import Engine
from cbatch.errors import PolicyError
from cbatch.host import drive
from cbatch.moves import Loading, Moved
from cbatch.record import RunRecord, Transfer
from cbatch.request import Request

_BETWEEN_TURNS = 0.1  # seconds between calls of `on_turn`


class _Replica(Posted):
    """The requests of an engine that serves on a thread of its own, which sends the ended ones, and at last None or its exception."""

    def __init__(self, engine: Engine, send: Callable[[Request | BaseException | None], object]) -> None:
        super().__init__(SimpleQueue())
        self._engine, self._send = engine, send
        self.thread = Thread(target=self._serve, name="replica", daemon=True)

    def receive(self, message: Any) -> None:
        if callable(message):
            message()
        else:
            super().receive(message)

    def ended(self, request: Request) -> None:
        super().ended(request)
        self._send(request)

    def _serve(self) -> None:
        try:
            drive(self._engine, self)
            self._send(None)
        except BaseException as error:
            self._send(error)


class _Prefilled(NamedTuple):
    """A request whose prompt a replica has computed."""

    request: Request
    replica: int
    moved: Moved


class LiveTransfers:
    """The moves of a cluster in real time. Each pair of replicas has a thread that copies blocks, while both compute.

    decoder's thread    blocks are reserved, `read` |                    | the blocks are cached, the request waits
    pair's thread                                   | copy, wait for it |
    prefiller's thread  blocks stay, leased                              | blocks are free

    prefilled: called on a prefiller's thread. post: runs a function on a replica's thread. fail: ends the run with an error.
    """

    push = False

    def __init__(
        self,
        moves: Moves,
        engines: Sequence[Engine],
        pairs: Iterable[tuple[int, int]],
        prefilled: Callable[[_Prefilled], object],
        post: Callable[[int, Callable[[], object]], object],
        fail: Callable[[BaseException], object],
    ) -> None:
        """pairs: those between which requests may move."""
        assert moves.connect is not None, "real tokens need a copy of their blocks"
        self._moves, self._engines, self._prefilled, self._post, self._fail = moves, engines, prefilled, post, fail
        self.done: list[Transfer] = []
        self.prefiller_of: dict[int, int] = {}  # by the request's id
        self._copies = {
            (sender, receiver): moves.connect(engines[sender].executor, engines[receiver].executor)
            for sender, receiver in pairs
        }
        self._threads = {pair: ThreadPoolExecutor(1, f"copies {pair[0]} to {pair[1]}") for pair in self._copies}
        for replica, engine in enumerate(engines):
            engine.state.hands_over = partial(self._hands_over, replica)
            engine.on_leave = partial(self._leave, replica)
            engine.inbox.read = partial(self._read, replica)
            engine.inbox.drop = self._drop

    def settle(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        for engine in self._engines:
            engine.settle()

    def close(self) -> None:
        """Waits for the copy that each thread has begun, and drops the others."""
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)

    def _hands_over(self, replica: int, request: Request) -> bool:
        return self.prefiller_of.get(request.id) == replica

    def _leave(self, replica: int, request: Request) -> None:
        self._prefilled(_Prefilled(request, replica, self._engines[replica].give(request, self._moves.lease)))

    def _read(self, decoder: int, loading: Loading, moved: Moved, now: float) -> None:
        pair, first = (self.prefiller_of[loading.request.id], decoder), loading.num_found
        here = self._engines[decoder].state.pool.tables[loading.row, first : len(loading.hashes)].copy()
        self._threads[pair].submit(self._copy, pair, (moved.blocks[first:], here), loading.request, moved, now)

    def _copy(self, pair: tuple[int, int], blocks: Any, request: Request, moved: Moved, began: float) -> None:
        """Runs on the pair's thread."""
        try:
            num_bytes = self._copies[pair](blocks) if len(blocks[0]) else 0
        except BaseException as error:
            self._fail(error)
            return
        decoder = self._engines[pair[1]]
        tokens = len(blocks[0]) * decoder.state.pool.block_size
        self.done.append(Transfer(request.id, *pair, tokens, num_bytes, began, decoder.now()))
        decoder.inbox.copied.append(request.id)
        self._post(pair[1], partial(decoder.poke, 0.0))
        self._drop(request, moved)

    def _drop(self, request: Request, moved: Moved) -> None:
        if moved.lease is not None:
            moved.lease.end()
            sender = self.prefiller_of[request.id]
            self._post(sender, partial(self._engines[sender].poke, 0.0))


class LiveCluster(Cluster):
    """A `Cluster` whose replicas serve at the same time."""

    def _attach_moves(self, moves: Moves) -> None:
        roles = [view.role for view in self._views]
        pairs = [
            (sender, receiver)
            for sender, receiver in permutations(range(len(roles)), 2)
            if roles[sender] is not Role.DECODE and roles[receiver] is not Role.PREFILL
        ]
        self.transfers: Any = LiveTransfers(moves, self.engines, pairs, self._tell, self._post, self._tell)

    def _tell(self, message: Any) -> None:
        self._messages.put(message)

    def _post(self, replica: int, function: Callable[[], object]) -> None:
        self._replicas[replica].messages.put(function)

    def run(self, on_turn: Callable[[Any], object] = lambda cluster: None) -> RunRecord:
        """Serves as `Cluster`; `on_turn` is called every 0.1 s. An exception in a replica, or here, ends all replicas."""
        with self._serving():
            return super().run(on_turn)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        self.executor.now()  # starts all clocks
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._received: list[Any] = []
        self._replicas = [_Replica(engine, self._messages.put) for engine in self.engines]
        self._decoders: dict[int, int] = {}  # by the request's id; -1: not chosen yet
        self._num_serving, self._num_open = len(self._replicas), [0] * len(self._replicas)
        for engine, replica in zip(self.engines, self._replicas, strict=True):
            engine.arrivals = replica
            replica.thread.start()
        try:
            yield
        except BaseException:
            self.executor.close()
            for replica in self._replicas:
                replica.messages.put(None)
                replica.thread.join(timeout=10)
            raise
        finally:
            if self.transfers is not None:
                self.transfers.close()

    # -- the host of `drive` ------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """The replicas that still serve, as what these have in flight is known to their threads alone."""
        return self._num_serving

    def now(self) -> float:
        return self.executor.now()

    def next_at(self) -> float:
        return inf if not self._received and self._messages.empty() else 0.0

    def arrive(self, request: Request, now: float) -> None:
        replica, decoder = self.route(request, now)
        if self._rejected:
            raise PolicyError(
                f"router {type(self.router).__name__} rejected a request; routers do so in simulation only"
            )
        self._num_open[replica] += 1
        if self.transfers is not None and decoder != replica:
            self._decoders[request.id] = decoder
            self._bind(decoder, 1)
            self.transfers.prefiller_of[request.id] = replica
        self._replicas[replica].messages.put(request)

    def sleep_until(self, time: float) -> None:
        may_follow = self.arrivals.follow_ends or self.transfers is not None
        if not self.arrivals.num_unfinished or (time == inf and not may_follow):
            for replica in self._replicas:
                replica.messages.put(None)
        if self.fleet is not None:
            self.fleet.advance(self.now())
            time = min(time, self.fleet.next_at)
        with suppress(Empty):
            self._received.append(self._messages.get(timeout=max(min(time - self.now(), _BETWEEN_TURNS), 0.0)))

    def turn(self, until: float) -> Sequence[Request]:
        """Returns the requests that have ended since the last call; raises the exception of a replica."""
        while not self._messages.empty():
            self._received.append(self._messages.get())
        received, self._received = self._received, []
        for message in received:
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, _Prefilled):
                self._hand_over(*message)
        self._num_serving -= received.count(None)
        ended = [message for message in received if isinstance(message, Request)]
        for request in ended:
            self._num_open[self.replica_of[request.id]] -= 1
            self._bind(self._decoders.pop(request.id, -1), -1)
        if self.fleet is not None:
            for replica in range(len(self.engines)):
                self.fleet.note_idle(replica)
        return ended

    def _hand_over(self, request: Request, prefiller: int, moved: Moved) -> None:
        self._bind(chosen := self._decoders.pop(request.id), -1)
        decoder = self._decoder_of(request, chosen, self.now())
        self._num_open[prefiller] -= 1
        self._num_open[decoder] += 1
        self._post(decoder, partial(self.engines[decoder].offer, request, moved, 0.0))

    def _bind(self, decoder: int, sign: int) -> None:
        """Counts a request whose decoder, if that is not -1, was chosen before the prefill."""
        if decoder >= 0:
            self._num_open[decoder] += sign

    def _idle_at(self, replica: int) -> float:
        """Returns now if the ends of all its requests are known, and what these have left there has been read."""
        return inf if self._num_open[replica] or self.engines[replica].state.leases else self.now()

    def _restart(self, replica: int) -> None:
        self._replicas[replica].messages.put(self.engines[replica].restart)
