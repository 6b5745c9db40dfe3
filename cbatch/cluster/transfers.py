"""Requests that one replica prefills and another decodes: their states, and the transfers between the two.

pull    arrival -> prefill -> held there | the decoder has room: blocks reserved -> transfer -> waits -> decode
push    arrival | the decoder has room: blocks reserved -> prefill, sent by chunk or layer -> rest of the transfer -> waits -> decode

The router chooses both replicas: the second when the prompt has been computed, or at the arrival with `push`. Events of one time happen in
the order of transfers that end, prefills that end, clients that leave, arrivals, turns; among equal ones the lower replica, then the lower id, comes first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import Any, Protocol

from cbatch.cluster.links import Link
from cbatch.cluster.routers import Route
from cbatch.engine import Engine
from cbatch.executor import Step
from cbatch.moves import Loading, Moved
from cbatch.record import Transfer
from cbatch.request import FinishReason, Request, leaves_at

_LINK, _PREFILL, _LEFT = range(3)  # kinds of events, in the order in which those of one time happen


class Copy(Protocol):
    """A copy of KV blocks that has begun."""

    def wait(self) -> tuple[int, float]:
        """Waits for its end. Returns the bytes, and for how many seconds it has been over."""

    def precede(self) -> None:
        """Lets the receiver's iterations that are launched from now on wait for it. Called by the thread that launches them."""


Copier = Callable[[Any], Copy]  # begins to copy KV blocks, int32 [2, blocks], their numbers there and here


class Seconds(Protocol):
    def at(self, size: float) -> float: ...


@dataclass(frozen=True)
class Moves:
    """How requests move between replicas.

    block_bytes: of a KV block, all layers. gpus: of a replica, each of which sends an equal part of the bytes beside the others.
    link: seconds of a GPU's send against its bytes; the seconds of 0 bytes are its latency.
    delay: seconds by which such a send lengthens the sender's iterations, against its bytes; None: not at all.
    push: whether a decoder reserves blocks before the prefill begins. layers: sent as they are computed, with `push`; 1: full blocks, once an iteration has computed them.
    lease: seconds for which blocks are held for a decoder that has not begun to read them. fair: see `Link`.
    ahead: whether a request is admitted as its transfer begins: the receiver's next iteration waits for it on the device. Always, where tokens are real.
    connect: of two executors, where tokens are real: from the first to the second. Any thread begins copies.
    """

    block_bytes: int
    link: Seconds
    push: bool = False
    layers: int = 1
    lease: float = inf
    fair: bool = True
    ahead: bool = False
    gpus: int = 1
    delay: Seconds | None = None
    connect: Callable[[Any, Any], Copier] | None = None


class Transfers:
    """The moves of a simulated cluster."""

    def __init__(
        self,
        moves: Moves,
        engines: Sequence[Engine],
        decoder_of: Callable[[Request, int, float], int],
        schedule: Callable[[int], object],
    ) -> None:
        """decoder_of: notes the decoder of a request that was prefilled, and chooses it if -1. schedule: called with a replica that was poked."""
        self._moves, self._engines, self._decoder_of, self._schedule = moves, engines, decoder_of, schedule
        self.push = moves.push
        self.done, self.lost = list[Transfer](), list[Transfer]()
        self._route: dict[int, tuple[int, int]] = {}  # prefiller and decoder by id, -1 if not chosen yet
        self._links: dict[tuple[int, int], Link] = {}
        self._under_way: dict[tuple[int, int], tuple[Transfer, Moved]] = {}  # by receiver and id
        self._moved: dict[int, tuple[int, Moved]] = {}  # not read yet: by id, with the replica that holds it
        self._copies: dict[int, int] = {}  # `Route.copy` by id
        # by id: since when its prompt is sent, and its tokens before the newest chunk
        self._pushed: dict[int, tuple[float, int]] = {}
        # a heap: when, kind; then receiver and sender of a link, or the prefiller, id and request. Some are out of date
        self._events: list[tuple[float, int, int, int, Request | None]] = []
        for replica, engine in enumerate(engines):
            engine.state.hands_over = partial(self._hands_over, replica)
            engine.on_leave = partial(self._leave, replica)
            engine.inbox.on_gave_way = self._look_again
            engine.inbox.read, engine.inbox.on_lost = partial(self._read, replica), partial(self._lose, replica)
            engine.inbox.drop = partial(self._drop, replica)
            engine.inbox.on_kept, engine.inbox.take_back = self._on_kept, partial(self._take_back, replica)
            if moves.push:
                engine.on_absorbed = partial(self._note_chunks, replica)

    def send(self, request: Request, route: Route, now: float) -> None:
        """Takes a request that arrives. A decoder of -1 is chosen once the prompt has been computed."""
        prefiller, decoder, copy = route
        if copy not in (None, prefiller):
            self._copies[request.id] = copy
        if decoder != prefiller:
            self._route[request.id] = prefiller, decoder
        if decoder not in (-1, prefiller) and self._moves.push:
            self._engines[decoder].inbox.wanted.append(request)
            if (at := leaves_at(request)) < inf:  # no engine has the request until its blocks are kept
                heappush(self._events, (at, _LEFT, prefiller, request.id, request))
            self._poke(decoder, now)
        else:
            self._begin(request, prefiller, now)

    def _begin(self, request: Request, prefiller: int, now: float) -> None:
        """Hands a request to its prefiller, which may have to wait for a copy."""
        engine = self._engines[prefiller]
        if (sender := self._copies.pop(request.id, None)) is None:
            engine.arrive(request, now)
        else:
            moved = self._engines[sender].lend(request, self._moves.lease)
            self._moved[request.id] = sender, moved
            engine.offer(request, moved, now)
            self._poke(sender, now)
        self._schedule(prefiller)

    @property
    def next_at(self) -> float:
        return self._events[0][0] if self._events else inf

    def advance(self, now: float) -> None:
        """Carries out the events due by `now`."""
        while self._events and self._events[0][0] <= now:
            at, kind, replica, other, request = self._events[0]
            if request is None:
                self._advance_link((other, replica), at)
                continue
            heappop(self._events)
            if kind == _PREFILL:
                self._hand_over(request, replica, at)
            else:
                self._leave_early(request, replica, at)
            self._drop_outdated()

    def _leave_early(self, request: Request, prefiller: int, now: float) -> None:
        """Ends a request whose client has left, if no blocks have been reserved for it yet."""
        _, decoder = self._route.get(request.id, (-1, -1))
        if request in self._engines[decoder].inbox.wanted:
            self._engines[decoder].inbox.forget(request)
            self._engines[prefiller].refuse(request, FinishReason.CANCELLED, now)
            self._poke(decoder, now)
            self._schedule(prefiller)

    def _advance_link(self, ends: tuple[int, int], now: float) -> None:
        """Advances the link between a sender and a receiver."""
        for id_ in self._links[ends].advance(now):
            self._arrive(id_, ends[1], now)
        self._note_link(ends)

    def _note_link(self, ends: tuple[int, int]) -> None:
        if (at := self._links[ends].next_at) < inf:
            heappush(self._events, (at, _LINK, *ends[::-1], None))
        self._drop_outdated()

    def _drop_outdated(self) -> None:
        events = self._events
        while events and events[0][1] == _LINK and self._links[events[0][3], events[0][2]].next_at != events[0][0]:
            heappop(events)

    def expects(self, replica: int) -> bool:
        """Whether a request is bound for a replica, or there already and unfinished; a prefiller has no part in its decoding.

        Also whether a replica is to send a copy.
        """
        asked = (self._route[request.id][0] for engine in self._engines for request in engine.inbox.wanted)
        decoders = (decoder for _, decoder in self._route.values())
        return replica in asked or replica in self._copies.values() or replica in decoders

    def ended(self, request: Request, replica: int) -> None:
        """Forgets a request that has ended in a replica."""
        prefiller, decoder = self._route.pop(request.id, (-1, -1))
        self._pushed.pop(request.id, None)
        if (sender := self._copies.pop(request.id, None)) is not None:
            self._poke(sender, self._engines[replica].now())
        self._moved.pop(request.id, None)
        if replica == prefiller and decoder >= 0:
            self._engines[decoder].inbox.forget(request)
            self._poke(decoder, self._engines[replica].now())

    def settle(self) -> None:
        """Ends the transfers that are left after a run: those of requests whose clients have left."""
        while (at := self.next_at) < inf:
            self.advance(at)

    # -- called by engines, in their turns ------------------------------------------------------------------------------

    def _hands_over(self, replica: int, request: Request) -> bool:
        return self._route.get(request.id, (-1, -1))[0] == replica

    def _on_kept(self, request: Request, now: float) -> None:
        self._begin(request, self._route[request.id][0], now)

    def _leave(self, prefiller: int, request: Request) -> None:
        engine = self._engines[prefiller]
        self._moved[request.id] = prefiller, engine.give(request, self._moves.lease)
        executor: Any = engine.executor
        at = engine.now() + executor.host.handover_seconds
        heappush(self._events, (at, _PREFILL, prefiller, request.id, request))

    def _hand_over(self, request: Request, prefiller: int, now: float) -> None:
        decoder = self._decoder_of(request, self._route[request.id][1], now)
        self._route[request.id] = prefiller, decoder
        self._engines[decoder].offer(request, self._moved[request.id][1], now)
        self._schedule(decoder)

    def _read(self, receiver: int, loading: Loading, moved: Moved, now: float) -> bool:
        """Begins a transfer. Returns whether iterations from now on wait for it."""
        id_, link_seconds = loading.request.id, self._moves.link
        sender, _ = self._moved.pop(id_)
        number = len(moved.blocks) - loading.num_found
        link = self._links.setdefault((sender, receiver), Link(self._moves.fair))
        self._advance_link((sender, receiver), now)
        num_bytes, latency = number * self._moves.block_bytes, link_seconds.at(0)
        of_gpu = num_bytes / self._moves.gpus
        work, hidden = max(link_seconds.at(of_gpu) - latency, 0.0) if number else 0.0, 0.0
        block_size = self._engines[receiver].state.pool.block_size
        if number and id_ in self._pushed:
            latency = max(moved.at + latency - now, 0.0)
            since, before = self._pushed[id_]
            if self._moves.layers > 1:
                share = 1 - 1 / self._moves.layers
                since = moved.at - (moved.at - since) * share
            else:
                share = max(before // block_size - loading.num_found, 0) / number
            hidden = link.hide(since, moved.at, work * share)
        tokens = number * block_size
        share_hidden = hidden / work if work else 0.0
        if number and self._moves.delay is not None:
            executor: Any = self._engines[sender].executor
            executor.delay(self._moves.delay.at(of_gpu))
        transfer = Transfer(id_, sender, receiver, tokens, num_bytes, now, inf, share_hidden)
        self._under_way[receiver, id_] = transfer, moved
        link.add(id_, now, latency, work - hidden)
        self._note_link((sender, receiver))
        if self._moves.ahead:
            receives: Any = self._engines[receiver].executor
            receives.follow(link.ends_at(id_))
        return self._moves.ahead

    def _lose(self, receiver: int, request: Request, tokens: int, now: float) -> None:
        """Notes that a lease was over before its blocks could be read."""
        sender, _ = self._moved.pop(request.id)
        self.lost.append(Transfer(request.id, sender, receiver, tokens, 0, now, now))

    def _drop(self, receiver: int, request: Request, moved: Moved) -> None:
        """Ends a lease that the decoder does not need."""
        assert moved.lease is not None
        moved.lease.end()
        self._poke(self._moved[request.id][0], self._engines[receiver].now())

    def _arrive(self, id_: int, receiver: int, now: float) -> None:
        transfer, moved = self._under_way.pop((receiver, id_))
        self.done.append(transfer._replace(ended=now))
        assert moved.lease is not None
        moved.lease.end()
        self._engines[receiver].inbox.copied.append(id_)
        for replica in (transfer.sender, receiver):
            self._poke(replica, now)

    def _take_back(self, decoder: int, request: Request) -> None:
        """Frees the blocks kept for a request, all of which is then sent after its prefill."""
        self._pushed.pop(request.id, None)
        self._engines[decoder].inbox.forget(request)
        self._poke(decoder, self._engines[decoder].now())

    def _look_again(self, now: float) -> None:
        """Wakes the replicas with requests that wait for room: a lease of one of these may be over."""
        for replica, engine in enumerate(self._engines):
            if engine.inbox.offered:
                self._poke(replica, now)

    def _poke(self, replica: int, now: float) -> None:
        self._engines[replica].poke(now)
        self._schedule(replica)

    def _note_chunks(self, replica: int, step: Step) -> None:
        """Notes since when prompts for other replicas are sent, and how many of their tokens an iteration found computed."""
        if step.num_batch_tokens > step.num_decode_tokens:
            record = self._engines[replica].record.steps[-1]
            begun = record.started if self._moves.layers > 1 else record.ended
            for request, start in zip(step.requests, step.start.tolist(), strict=True):
                prefiller, decoder = self._route.get(request.id, (-1, -1))
                if prefiller == replica and request.id in self._engines[decoder].inbox.kept:
                    self._pushed[request.id] = self._pushed.get(request.id, (begun, 0))[0], start
