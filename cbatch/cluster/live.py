"""Replicas in real time: each engine serves on a thread of its own, and the thread that calls `run` routes arrivals.

router     sleeps until t1 | routes the arrivals at t1, posts them to replicas | sleeps until t2, or until a request has ended
replica    plans, computes, posts reports and ended requests | takes the posted requests into its next plan | ...
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import permutations
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from cbatch.arrivals import Posted
from cbatch.cluster.cluster import Cluster
from cbatch.cluster.live_transfers import LiveTransfers, Prefilled
from cbatch.cluster.transfers import Moves
from cbatch.cluster.views import Role
from cbatch.engine import Engine
from cbatch.errors import PolicyError
from cbatch.host import drive, uncollected
from cbatch.moves import Moved
from cbatch.policy import name_of
from cbatch.record import RunRecord
from cbatch.request import FinishReason, Request

_BETWEEN_TURNS = 0.1  # seconds between calls of `on_turn`


class _Replica(Posted):
    """The requests of an engine that serves on a thread of its own, which sends the ended ones, and at last None or its exception."""

    def __init__(self, engine: Engine, send: Callable[[Any], object]) -> None:
        super().__init__(SimpleQueue(), engine._stall_watch.patience.seconds)
        self._engine, self._send = engine, send
        self.thread = Thread(target=self._serve, name="replica", daemon=True)

    def left(self, prefilled: Prefilled) -> None:
        self._send(prefilled)

    def adopted(self, request: Request) -> None:
        pass

    def ended(self, request: Request) -> None:
        super().ended(request)
        self._send(request)

    def _serve(self) -> None:
        try:
            drive(self._engine, self)
            self._send(None)
        except BaseException as error:
            self._send(error)


class LiveCluster(Cluster):
    """A `Cluster` whose replicas serve at the same time."""

    def _attach_moves(self, moves: Moves) -> None:
        roles = [view.role for view in self._views]
        pairs = [
            (sender, receiver)
            for sender, receiver in permutations(range(len(roles)), 2)
            if roles[sender] is not Role.DECODE and roles[receiver] is not Role.PREFILL
        ]
        self.transfers: Any = LiveTransfers(moves, self.engines, pairs)

    def run(self, on_turn: Callable[[Any], object] = lambda cluster: None) -> RunRecord:
        """Serves as `Cluster`; `on_turn` is called every 0.1 s. An exception in a replica, or here, ends all replicas."""
        with uncollected(True), self._serving():
            return super().run(on_turn)

    def begin(self, replicas: Sequence[Any], messages: "SimpleQueue[Any]") -> None:
        """Routes to these replicas from now on. messages: what they send, for `take_in`."""
        self._replicas, self._messages, self._received = replicas, messages, list[Any]()
        self._decoders: dict[int, int] = {}  # by the request's id; -1: not chosen yet
        self._left = set[int]()  # ids of open requests whose clients have left
        for replica in replicas:
            replica.left_early = self._left
        if self.transfers is not None:
            self.transfers.replicas, self.transfers.messages = replicas, messages
        self._num_serving, self._num_open = len(replicas), [0] * len(replicas)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        self.executor.now()  # starts all clocks
        messages = SimpleQueue[Any]()
        replicas = [_Replica(engine, messages.put) for engine in self.engines]
        self.begin(replicas, messages)
        for engine, replica in zip(self.engines, replicas, strict=True):
            engine.arrivals = replica
            replica.thread.start()
        try:
            yield
        except BaseException:
            self.executor.close()
            for replica in replicas:
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
        replica, decoder, copy = self.route(request, now)
        if why := self._rejected.pop(request.id, ""):
            self._replicas[replica].messages.put(partial(self._refuse, replica, request, why))
            return
        if copy is not None:
            problem = f"router {name_of(self.router)} had a prefix copied, which none does in real time"
            raise PolicyError(f"{problem}; choose the replica that has it")
        self._num_open[replica] += 1
        if self.transfers is not None and decoder != replica:
            self._decoders[request.id] = decoder
            self._bind(decoder, 1)
            self.transfers.send(request, replica, decoder)
        else:
            self._replicas[replica].messages.put(request)

    def _refuse(self, replica: int, request: Request, why: str) -> None:
        """Lets a replica, on its thread, report the end of a request that the router has rejected."""
        self._replicas[replica].receive(request)
        self.engines[replica].cancel(request, FinishReason.REJECTED, why)

    def sleep_until(self, time: float) -> None:
        may_follow = self.arrivals.follow_ends or self.transfers is not None
        if not self.arrivals.num_unfinished or (time == inf and not may_follow):
            for replica in self._replicas:
                replica.messages.put(None)
        if self.fleet is not None:
            for replica in range(len(self.engines)):
                self.fleet.note_idle(replica)
            self.fleet.advance(self.now())
            time = min(time, self.fleet.next_at)
        with suppress(Empty):
            self._received.append(self._messages.get(timeout=max(min(time - self.now(), _BETWEEN_TURNS), 0.0)))

    def turn(self, until: float) -> Sequence[Request]:
        """Returns the requests that have ended since the last call; raises the exception of a replica."""
        while not self._messages.empty():
            self._received.append(self._messages.get())
        received, self._received = self._received, []
        return self.take_in(received)

    def take_in(self, received: Sequence[Any]) -> Sequence[Request]:
        """Takes in what replicas have sent; returns the requests that have ended. Raises the exception of a replica."""
        for message in received:
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, Prefilled):
                self._hand_over(*message)
        self._num_serving -= received.count(None)
        ended = [message for message in received if isinstance(message, Request)]
        for request in ended:
            self._left.discard(request.id)
            if (replica := self.replica_of.get(request.id)) is None:  # rejected by the router
                continue
            self._num_open[replica] -= 1
            self._bind(self._decoders.pop(request.id, -1), -1)
            if self.transfers is not None:
                self.transfers.ended(request, replica)
        return ended

    def _hand_over(self, request: Request, prefiller: int, moved: Moved) -> None:
        self._bind(chosen := self._decoders.pop(request.id), -1)
        decoder = self._decoder_of(request, chosen, self.now())
        self._num_open[prefiller] -= 1
        self._num_open[decoder] += 1
        self.transfers.offer(request, decoder, moved)

    def cancel(self, id_: int) -> None:
        """Tells the replica of an open request that its client has left; a replica to which it moves looks for itself."""
        if id_ not in self.replica_of:  # rejected by the router
            return
        self._left.add(id_)
        self._replicas[self.replica_of[id_]].messages.put(id_)
        if (decoder := self._decoders.get(id_, -1)) >= 0:
            self.transfers.leave(id_, decoder)

    def _bind(self, decoder: int, sign: int) -> None:
        """Counts a request whose decoder, if that is not -1, was chosen before the prefill."""
        if decoder >= 0:
            self._num_open[decoder] += sign

    def _idle_at(self, replica: int) -> float:
        """Returns now if the ends of all its requests are known, and no copy reads or writes blocks that these had there."""
        return inf if self._num_open[replica] or self.engines[replica].state.pool.num_used else self.now()

    def _restart(self, replica: int) -> None:
        self._replicas[replica].messages.put(self.engines[replica].restart)
