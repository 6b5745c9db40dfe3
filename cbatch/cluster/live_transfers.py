"""Moves of requests in real time. Each pair of replicas has a thread that copies blocks, in order, while both compute.

    decoder's thread    blocks are reserved: `_read`                                  | the blocks are cached, the request waits
    pair's thread                                   | copy, wait for it |
    prefiller's thread  blocks stay, leased                              | blocks are free

With `push` the decoder reserves blocks before the prefill, and full blocks are copied after each iteration, beside the next:

    decoder's thread    `_kept` |                                              | `_read`
    pair's thread                           | copy chunk 0 |   | copy chunk 1 |        | copy the rest |
    prefiller's thread          | chunk 0   | chunk 1          | chunk 2      | first token
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.cluster.transfers import Moves
from cbatch.engine import Engine
from cbatch.executor import Step
from cbatch.moves import Loading, Moved, hold
from cbatch.record import Transfer
from cbatch.request import Request

if TYPE_CHECKING:
    from cbatch.cluster.live import LiveCluster


class Prefilled(NamedTuple):
    """A request whose prompt a replica has computed."""

    request: Request
    replica: int
    moved: Moved


@dataclass(eq=False)
class _Sent:
    """The part of a request's blocks that is copied before the last copy.

    decoder, blocks: where they go. number: leading blocks that are there, or on their way. copies: bytes, start and end of each copy, seconds.
    """

    decoder: int
    blocks: NDArray[np.int32]
    number: int
    copies: list[tuple[int, float, float]] = field(default_factory=list)


class LiveTransfers:
    """The moves of a cluster in real time."""

    def __init__(
        self, moves: Moves, engines: Sequence[Engine], pairs: Iterable[tuple[int, int]], threads: "LiveCluster"
    ) -> None:
        """pairs: those between which requests may move."""
        assert moves.connect is not None, "real tokens need a copy of their blocks"
        self._moves, self._engines, self._threads, self.push = moves, engines, threads, moves.push
        self.done: list[Transfer] = []
        self._prefiller_of: dict[int, int] = {}  # by the request's id
        self._sent: dict[int, _Sent] = {}  # by the request's id, from `_kept` to `_read`
        self._copies = {
            (sender, receiver): moves.connect(engines[sender].executor, engines[receiver].executor)
            for sender, receiver in pairs
        }
        self._of_pairs = {pair: ThreadPoolExecutor(1, f"copies {pair[0]} to {pair[1]}") for pair in self._copies}
        for replica, engine in enumerate(engines):
            engine.state.hands_over = partial(self._hands_over, replica)
            engine.on_leave = partial(self._leave, replica)
            engine.inbox.read = partial(self._read, replica)
            engine.inbox.drop = self._drop
            if moves.push:
                engine.inbox.on_kept = partial(self._kept, replica)
                engine.on_absorbed = partial(self._send_computed, replica)

    # -- called by the thread that routes -----------------------------------------------------------------------------

    def send(self, request: Request, prefiller: int, decoder: int) -> None:
        """Takes a request that arrives. decoder: -1: chosen once the prompt has been computed."""
        self._prefiller_of[request.id] = prefiller
        if self.push and decoder >= 0:
            self._threads.post(decoder, partial(self._want, decoder, request))
        else:
            self._threads.post(prefiller, request)

    def offer(self, request: Request, prefiller: int, decoder: int, moved: Moved) -> None:
        """Hands a request with a computed prompt to its decoder, after the copies that have begun."""
        offer = partial(self._threads.post, decoder, partial(self._offer, decoder, request, moved))
        self._in_order((prefiller, decoder), offer) if request.id in self._sent else offer()

    def ended(self, request: Request, replica: int) -> int | None:
        """Forgets a request that has ended in a replica; returns the decoder that was told of it and never got it."""
        prefiller, sent = self._prefiller_of.get(request.id), self._sent.get(request.id)
        if sent is None:
            return None
        del self._sent[request.id]
        if replica != prefiller:
            return None
        forget = partial(self._forget, sent.decoder, request)
        self._in_order((prefiller, sent.decoder), partial(self._threads.post, sent.decoder, forget))
        return sent.decoder

    def settle(self) -> None:
        """Ends what is left after a run: copies for requests whose clients have left."""
        for thread in self._of_pairs.values():
            thread.shutdown()
        self._threads.run_posted()
        for engine in self._engines:
            engine.settle()

    def close(self) -> None:
        """Waits for the copy that each thread has begun, and drops the others."""
        for thread in self._of_pairs.values():
            thread.shutdown(cancel_futures=True)

    # -- called by engines, in their turns ----------------------------------------------------------------------------

    def _hands_over(self, replica: int, request: Request) -> bool:
        return self._prefiller_of.get(request.id) == replica

    def _leave(self, replica: int, request: Request) -> None:
        self._threads.tell(Prefilled(request, replica, self._engines[replica].give(request, self._moves.lease)))

    def _want(self, decoder: int, request: Request) -> None:
        self._engines[decoder].inbox.wanted.append(request)
        self._engines[decoder].poke(0.0)

    def _kept(self, decoder: int, request: Request, now: float) -> None:
        inbox, pool = self._engines[decoder].inbox, self._engines[decoder].state.pool
        row, found = inbox.kept[request.id].row, inbox.kept[request.id].num_found
        self._sent[request.id] = _Sent(decoder, pool.tables[row, : pool.held_by(row)].copy(), found)
        self._threads.post(self._prefiller_of[request.id], request)

    def _send_computed(self, replica: int, step: Step) -> None:
        """Begins to copy the full blocks that an iteration has completed."""
        if not self._sent or step.num_batch_tokens == step.num_decode_tokens:
            return
        engine = self._engines[replica]
        for request, end in zip(step.requests, (step.start + step.num_tokens).tolist(), strict=True):
            sent, number = self._sent.get(request.id), end // engine.state.pool.block_size
            if sent is None or number <= sent.number or not self._is_prefilled(replica, request):
                continue
            if (held := hold(engine.state, request, number, engine.now())) is not None:
                blocks = held.blocks[sent.number :], sent.blocks[sent.number : number]
                sent.number = number
                self._in_order((replica, sent.decoder), partial(self._copy_part, replica, sent, blocks, request, held))

    def _is_prefilled(self, replica: int, request: Request) -> bool:
        return request._table is self._engines[replica].state.table and self._hands_over(replica, request)

    def _read(self, decoder: int, loading: Loading, moved: Moved, now: float) -> None:
        pool, row, id_ = self._engines[decoder].state.pool, loading.row, loading.request.id
        sent = self._sent.pop(id_, None) or _Sent(
            decoder, pool.tables[row, : pool.held_by(row)].copy(), loading.num_found
        )
        pair = self._prefiller_of[id_], decoder
        self._in_order(pair, partial(self._copy_rest, pair, sent, loading, moved, now))

    def _offer(self, decoder: int, request: Request, moved: Moved) -> None:
        self._engines[decoder].offer(request, moved, 0.0)
        self._threads.adopted(request, decoder)

    def _forget(self, decoder: int, request: Request) -> None:
        self._engines[decoder].inbox.forget(request)
        self._engines[decoder].poke(0.0)

    def _drop(self, request: Request, moved: Moved) -> None:
        """Ends a lease."""
        if moved.lease is not None:
            moved.lease.end()
            sender = self._prefiller_of[request.id]
            self._threads.post(sender, partial(self._engines[sender].poke, 0.0))

    # -- on the threads of pairs --------------------------------------------------------------------------------------

    def _in_order(self, pair: tuple[int, int], function: Callable[[], object]) -> None:
        """Runs a function on a pair's thread, after the earlier ones."""
        self._of_pairs[pair].submit(self._guard, function)

    def _guard(self, function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            self._threads.tell(error)

    def _copy_part(self, prefiller: int, sent: _Sent, blocks: Any, request: Request, held: Moved) -> None:
        self._copy((prefiller, sent.decoder), sent, blocks)
        self._drop(request, held)

    def _copy_rest(self, pair: tuple[int, int], sent: _Sent, loading: Loading, moved: Moved, asked_at: float) -> None:
        request, decoder = loading.request, self._engines[pair[1]]
        self._copy(pair, sent, (moved.blocks[sent.number :], sent.blocks[sent.number :]))
        spans = [(start, end) for _, start, end in sent.copies]
        hidden = sum(max(min(end, moved.at) - start, 0.0) for start, end in spans)
        tokens = (len(moved.blocks) - loading.num_found) * decoder.state.pool.block_size
        num_bytes, seconds = sum(copy[0] for copy in sent.copies), sum(end - start for start, end in spans)
        times = asked_at, spans[-1][1], hidden / seconds if seconds else 0.0
        self.done.append(Transfer(request.id, *pair, tokens, num_bytes, *times))
        decoder.inbox.copied.append(request.id)
        self._threads.post(pair[1], partial(decoder.poke, 0.0))
        self._drop(request, moved)

    def _copy(self, pair: tuple[int, int], sent: _Sent, blocks: Any) -> None:
        now = self._engines[pair[1]].now
        start = now()
        num_bytes = self._copies[pair](blocks) if len(blocks[0]) else 0
        sent.copies.append((num_bytes, start, now()))
