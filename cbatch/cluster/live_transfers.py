"""Moves of requests in real time. A copy begins on the thread that learns of its blocks; a thread of each pair of replicas waits for it.

    decoder's thread    blocks are reserved, copy begins: `_read`; the request waits   | its row is free
    decoder's device    iterations before | wait for the copy   | iterations with the request
    pair's thread                         | wait for the copy   |
    prefiller's thread  blocks stay, leased                                            | blocks are free

With `push` the decoder reserves blocks before the prefill, and full blocks are copied after each iteration, beside the next:

    decoder's thread    `_kept` |                                                                   | `_read`
    pair's thread                                 | wait for chunk 0 |   | wait for chunk 1 |   | wait |
    prefiller's thread          | chunk 0         | chunk 1              | chunk 2              | first token

If layers are sent as computed, each layer writes the keys and values of its tokens to both caches. Then only what the prefiller has
found in its prefix cache is copied, and `_read` has nothing to wait for.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from cbatch.cluster.sent_blocks import SentBlocks
from cbatch.cluster.transfers import Copy, Moves
from cbatch.engine import Engine
from cbatch.executor import Step
from cbatch.moves import Loading, Moved, hold
from cbatch.record import Transfer
from cbatch.request import Request


class Prefilled(NamedTuple):
    """A request whose prompt a replica has computed."""

    request: Request
    replica: int
    moved: Moved


class LiveTransfers:
    """The moves of a cluster in real time.

    replicas: whose threads take messages: a request that arrives, or a function to call. messages: to the thread that routes. See `LiveCluster.begin`.
    """

    replicas: Sequence[Any]
    messages: "SimpleQueue[Any]"

    def __init__(self, moves: Moves, engines: Sequence[Engine], pairs: Iterable[tuple[int, int]]) -> None:
        """pairs: those between which requests may move."""
        assert moves.connect is not None, "real tokens need a copy of their blocks"
        self._moves, self._engines, self.push = moves, engines, moves.push
        self.done, self.lost = list[Transfer](), list[Transfer]()
        self._prefiller_of: dict[int, int] = {}  # by the request's id
        self._sent: dict[int, SentBlocks] = {}  # by the request's id, from `_kept` to `_read`
        self._copies = {
            (sender, receiver): moves.connect(engines[sender].executor, engines[receiver].executor)
            for sender, receiver in pairs
        }
        self._of_pairs = {pair: ThreadPoolExecutor(1, f"copies {pair[0]} to {pair[1]}") for pair in self._copies}
        self._places = {  # in `Step.sent`, of index 0 in the decoder's cache
            (sender, receiver): cast(Any, engines[sender].executor).send_to(engines[receiver].executor)
            for sender, receiver in self._copies
            if moves.layers > 1
        }
        self._after_flight: dict[int, list[tuple[int, Callable[[], object]]]] = defaultdict(list)
        for replica, engine in enumerate(engines):
            engine.state.hands_over = partial(self._hands_over, replica)
            engine.on_leave = partial(self._leave, replica)
            engine.inbox.on_gave_way = self._look_again
            engine.inbox.read, engine.inbox.on_lost = partial(self._read, replica), partial(self._lose, replica)
            engine.inbox.drop = self._drop_unread
            if moves.push:
                engine.inbox.on_kept = partial(self._kept, replica)
                engine.inbox.on_left, engine.inbox.take_back = self._prefill, self._take_back
                engine.inbox.free = partial(self._free, replica)
                engine.on_absorbed = partial(self._send_computed, replica)
                engine.on_launch = partial(self._send_layers, replica)

    # -- called by the thread that routes -----------------------------------------------------------------------------

    def send(self, request: Request, prefiller: int, decoder: int) -> None:
        """Takes a request that arrives. decoder: -1: chosen once the prompt has been computed."""
        self._prefiller_of[request.id] = prefiller
        if self.push and decoder >= 0:
            self._tell(decoder, partial(self._engines[decoder].inbox.wanted.append, request))
        else:
            self._prefill(request)

    def leave(self, id_: int, decoder: int) -> None:
        """Notes that a client has left, whose request may wait for blocks of its decoder."""
        if self.push:
            self._tell(decoder, partial(self._engines[decoder].inbox.turn_away, id_))

    def offer(self, request: Request, decoder: int, moved: Moved) -> None:
        """Hands a request with a computed prompt to its decoder."""
        self._tell(decoder, partial(self._offer, decoder, request, moved))

    def ended(self, request: Request, replica: int) -> None:
        """Forgets a request that has ended in a replica."""
        if replica == self._prefiller_of.pop(request.id, -1) and request.id in self._sent:
            self._tell(replica, partial(self._send_no_more, replica, request))

    def settle(self) -> None:
        """Ends what is left after a run: copies for requests whose clients have left."""
        self._take_late()
        self.close()
        self._take_late()

    def _take_late(self) -> None:
        """Calls the functions that came too late for the replicas' threads, which have ended."""
        for replica in self.replicas:
            while not replica.messages.empty():
                if callable(message := replica.messages.get()):
                    message()

    def close(self) -> None:
        """Waits for the copies that have begun."""
        for thread in self._of_pairs.values():
            thread.shutdown()

    # -- called by engines, in their turns ----------------------------------------------------------------------------

    def _hands_over(self, replica: int, request: Request) -> bool:
        return self._prefiller_of.get(request.id) == replica

    def _leave(self, replica: int, request: Request) -> None:
        moved = self._engines[replica].give(request, self._moves.lease)
        self.replicas[replica].left(Prefilled(request, replica, moved))

    def _look_again(self, now: float) -> None:
        """Wakes the replicas: a lease of a request that waits for room may be over."""
        for replica in range(len(self._engines)):
            self._tell(replica)

    def _kept(self, decoder: int, request: Request, now: float) -> None:
        pair, kept = (self._prefiller_of[request.id], decoder), self._engines[decoder].inbox.kept[request.id]
        self._sent[request.id] = SentBlocks.to(pair, self._engines[decoder].state.pool, kept, self._places.get(pair, 0))
        self._prefill(request)

    def _prefill(self, request: Request) -> None:
        """Hands a request to its prefiller, which ends it if its client has left."""
        self.replicas[self._prefiller_of[request.id]].messages.put(request)

    def _send_layers(self, replica: int, step: Step) -> None:
        """Lets the layers of an iteration write the tokens of full blocks to decoders."""
        if not self._places or not self._sent or step.num_batch_tokens == step.num_decode_tokens:
            return
        step.sent = np.zeros(step.num_batch_tokens, np.int32)
        starts, numbers, ends = (each.tolist() for each in (step.start, step.num_tokens, step.num_tokens.cumsum()))
        for request, start, number, end in zip(step.requests, starts, numbers, ends, strict=True):
            if (sent := self._sent_of(replica, request)) is not None:
                places = sent.places.reshape(-1)[start : start + number]  # fewer at the end of a prompt
                step.sent[end - number :][: len(places)] = places
                sent.there.reshape(-1)[start : start + number] = True

    def _send_computed(self, replica: int, step: Step) -> None:
        """Begins to copy the full blocks that an iteration has completed, and that its layers have not sent."""
        after = self._after_flight[replica]
        while after and after[0][0] <= step.index:
            after.pop(0)[1]()
        if not self._sent or step.num_batch_tokens == step.num_decode_tokens:
            return
        engine = self._engines[replica]
        for request, end in zip(step.requests, (step.start + step.num_tokens).tolist(), strict=True):
            if (sent := self._sent_of(replica, request)) is None:
                continue
            number = min(end // engine.state.pool.block_size, len(sent.blocks))
            if not len(missing := sent.missing(number)):
                continue
            if (held := hold(engine.state, request, number, engine.now())) is not None:
                self._copy(sent, missing, held)
                self._in_order(sent.pair, partial(self._drop, replica, held))

    def _sent_of(self, replica: int, request: Request) -> SentBlocks | None:
        """Returns the blocks sent of a request that a replica prefills for another; None if it sends none, or no more."""
        is_here = request._table is self._engines[replica].state.table and self._hands_over(replica, request)
        sent = self._sent.get(request.id) if is_here else None
        return None if sent is None or sent.is_over else sent

    def _take_back(self, request: Request) -> None:
        if (prefiller := self._prefiller_of.get(request.id)) is not None:
            self._tell(prefiller, partial(self._send_no_more, prefiller, request))

    def _send_no_more(self, prefiller: int, request: Request) -> None:
        """Tells a request's decoder to free the blocks that it keeps, once no layer writes to them."""
        if (sent := self._sent.get(request.id)) is not None:
            sent.is_over, (_, decoder) = True, sent.pair
            forget = partial(self._engines[decoder].inbox.forget, request)
            self._when_landed(prefiller, partial(self._tell, decoder, forget))

    def _when_landed(self, replica: int, function: Callable[[], object]) -> None:
        """Calls a function once the iterations in flight have ended, whose layers may write to blocks of other replicas."""
        if in_flight := self._engines[replica]._in_flight:
            self._after_flight[replica].append((in_flight[-1].step.index, function))
        else:
            function()

    def _read(self, decoder: int, loading: Loading, moved: Moved, now: float) -> bool:
        """Copies what is missing. Returns True: iterations from now on wait for the copies."""
        pool, id_ = self._engines[decoder].state.pool, loading.request.id
        number = len(moved.blocks)
        if (sent := self._sent.pop(id_, None)) is None:
            sent = SentBlocks.to((self._prefiller_of[id_], decoder), pool, loading)
            missing = np.arange(loading.num_found, number)
        else:
            missing = sent.missing(number)
        if len(missing):
            self._copy(sent, missing, moved)
        end = partial(self._end, sent, loading, moved, now)
        if sent.latest is None or not sent.is_copying:
            end()
            return False
        sent.latest.precede()
        self._in_order(sent.pair, end)
        return True

    def _lose(self, decoder: int, request: Request, tokens: int, now: float) -> None:
        """Notes that a lease was over before its blocks could be read."""
        pair = self._prefiller_of[request.id], decoder
        self.lost.append(Transfer(request.id, *pair, tokens, 0, now, now))

    def _free(self, decoder: int, loading: Loading) -> None:
        """Frees what a decoder keeps for a request that does not read it, after the copies that have begun."""
        inbox, sent = self._engines[decoder].inbox, self._sent.pop(loading.request.id, None)
        if sent is None or not sent.is_copying:
            inbox.freed.append(loading)
        else:
            self._in_order(sent.pair, partial(self._tell, decoder, partial(inbox.freed.append, loading)))

    def _copy(self, sent: SentBlocks, missing: NDArray[np.int64], moved: Moved) -> None:
        start = self._engines[sent.pair[1]].now()
        sent.latest = copy = self._copies[sent.pair]((moved.blocks[missing], sent.blocks[missing]))
        sent.there[missing] = True
        sent.num_begun += 1
        self._in_order(sent.pair, partial(self._wait, sent, len(missing), start, copy))

    def _offer(self, decoder: int, request: Request, moved: Moved) -> None:
        self._engines[decoder].offer(request, moved, 0.0)
        self.replicas[decoder].adopted(request)

    def _drop_unread(self, request: Request, moved: Moved) -> None:
        self._drop(self._prefiller_of[request.id], moved)

    def _drop(self, sender: int, moved: Moved) -> None:
        """Ends a lease."""
        if moved.lease is not None:
            moved.lease.end()
            self._tell(sender)

    def _tell(self, replica: int, function: Callable[[], object] = lambda: None) -> None:
        """Lets a replica's thread call a function, and look at its leases and its inbox."""
        self.replicas[replica].messages.put(partial(self._act, replica, function))

    def _act(self, replica: int, function: Callable[[], object]) -> None:
        function()
        self._engines[replica].poke(0.0)

    # -- on the threads of pairs --------------------------------------------------------------------------------------

    def _in_order(self, pair: tuple[int, int], function: Callable[[], object]) -> None:
        """Runs a function on a pair's thread, after the earlier ones."""
        self._of_pairs[pair].submit(self._guard, function)

    def _guard(self, function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            self.messages.put(error)

    def _end(self, sent: SentBlocks, loading: Loading, moved: Moved, asked_at: float) -> None:
        """Ends a transfer whose blocks have all arrived."""
        request, (sender, receiver) = loading.request, sent.pair
        decoder = self._engines[receiver]
        number, copies = len(moved.blocks) - loading.num_found, sent.copies
        by_layers = (number - sum(copy[0] for copy in copies)) * self._moves.block_bytes
        num_bytes = by_layers + sum(copy[1] for copy in copies)
        late = sum(size * np.interp(moved.at, times, (1.0, 0.0)).item() for _, size, *times in copies)
        hidden = 1 - late / num_bytes if num_bytes else 0.0
        start, ended = copies[-1][2:] if copies else (asked_at, asked_at)
        start, tokens = max(min(start, asked_at), moved.at), number * decoder.state.pool.block_size
        self.done.append(Transfer(request.id, sender, receiver, tokens, num_bytes, start, max(ended, start), hidden))
        decoder.inbox.copied.append(request.id)
        self._tell(receiver)
        self._drop(sender, moved)

    def _wait(self, sent: SentBlocks, number: int, start: float, copy: Copy) -> None:
        num_bytes, late = copy.wait()
        sent.copies.append((number, num_bytes, start, self._engines[sent.pair[1]].now() - late))
