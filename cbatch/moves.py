"""Moves a request from one engine to another, with the KV cache that the sender has computed.

    sender      runs | gives: row and blocks stay, leased          | lease ends: row and blocks are free
    link                      | blocks are copied ----------------> |
    receiver        | offered | reserves a row and blocks           | the request waits, and holds the blocks | admitted

A move is a preemption whose blocks are in the receiver's prefix cache when the request waits there: the plan that admits it finds them. Until
then the request holds them, as in vLLM and SGLang. Full blocks are sent; the receiver computes the tokens of the last, partial block again,
and what was lost with a lease or given up for lack of room. The state of an engine changes in `advance` alone, before a plan: each engine
may run on a thread of its own.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.executor import Step
from cbatch.kv import BlockHash, blocks_for
from cbatch.kv.hashes import Prefix
from cbatch.lease import Lease
from cbatch.request import Request, Status, spec_of
from cbatch.state import State


class Moved(NamedTuple):
    """What a request leaves at its sender. Its output is in the request.

    blocks: int32, the numbers of its full blocks there, [blocks]. lease: None without blocks. at: seconds of the move.
    """

    blocks: NDArray[np.int32]
    lease: Lease | None
    at: float


class Loading(NamedTuple):
    """A row of the receiver that holds blocks for a request which is on its way.

    hashes: of these blocks. num_found: leading blocks that the receiver had already.
    """

    request: Request
    row: int
    hashes: Sequence[BlockHash]
    num_found: int


class Room(NamedTuple):
    """The KV blocks of a receiver that decides whether to take the next request.

    lacking: for the request's KV cache. free: can be taken. promised: of requests that wait to be admitted; all but `held` of them are among the
    free ones. growth: that all its requests, and this one, may yet take for `GROWTH` further tokens each. is_idle: it has none.
    """

    num_blocks: int
    lacking: int
    free: int
    promised: int
    growth: int
    is_idle: bool
    held: int = 0


GROWTH = 512
"""Further tokens of each request for which a receiver keeps blocks free (SGLang's `num_reserved_decode_tokens`)."""


def has_room(room: Room) -> bool:
    """Counts the growth of running requests, without which all of them stop once the cache is full."""
    return room.lacking + (0 if room.is_idle else room.promised - room.held + room.growth) <= room.free


def give(state: State, request: Request, in_flight: Iterable[Step], now: float, until: float = inf) -> Moved:
    """Takes a request out of an engine.

    in_flight: steps. Tokens that they sample for the request are dropped, and what they write is not sent.
    until: seconds at which the blocks here end, unless the receiver has begun to read them.
    """
    row, num_computed, written = request._row, 0, 0
    if request.status is Status.RUNNING:
        num_computed = state.table.computed.item(row) - state.table.drafts.item(row)
        written = num_computed
        if starts := [step.start.item(step.requests.index(request)) for step in in_flight if request in step.requests]:
            written = min(*starts, state.table.known.item(row) - 1)  # with drafts in flight, starts are upper bounds
    blocks = state.pool.tables[row, : written // state.pool.block_size].copy()
    prefix, (left, lease) = request._prefix, (state.close(request), None)
    if left is not None and len(blocks):
        state.free_blocks(left, len(blocks))
        state.leases.append(lease := Lease(left, until))
    elif left is not None:
        state.free_row(left)
    request.move(num_computed)
    request.status, request._prefix = Status.MOVING, prefix
    return Moved(blocks, lease, now)


def hold(state: State, request: Request, num_blocks: int, now: float) -> Moved | None:
    """Leases the first blocks of a request that is being prefilled, to be read at once. Returns None if they are no longer cached."""
    assert state.cache is not None and request._prefix is not None, "the sender of a move has a prefix cache"
    hashes = request._prefix.hashes(num_blocks)[:num_blocks]
    if state.cache.pool.num_on_device(hashes) < num_blocks:
        return None
    moved = _lease(state, request, hashes, now)
    assert moved.lease is not None
    moved.lease.begin(now)
    return moved


def lend(state: State, request: Request, now: float, until: float = inf) -> Moved:
    """Leases what the prefix cache has of an arriving request's prompt but for its last token, for an engine that has less of it."""
    assert state.cache is not None, "only cached blocks are lent"
    pool, request.status = state.cache.pool, Status.MOVING
    most = (request.num_prompt_tokens - 1) // pool.block_size
    hashes = Prefix(request, pool, state.table).hashes(most)[:most]
    number = pool.num_on_device(hashes)
    return _lease(state, request, hashes[:number], now, until) if number else Moved(np.zeros(0, np.int32), None, now)


def _lease(state: State, request: Request, hashes: Sequence[BlockHash], now: float, until: float = inf) -> Moved:
    """Leases cached blocks in a row of their own."""
    assert state.cache is not None
    row, pool = state.table.take_row(request.id), state.cache.pool
    state.fit_pool()
    pool.share(row, hashes)
    state.leases.append(lease := Lease(row, until))
    return Moved(pool.tables[row, : len(hashes)].copy(), lease, now)


def end_leases(state: State, now: float) -> float:
    """Frees what leases that are over have held; returns when the next one may be over."""
    held = [lease for lease in state.leases if not lease.is_over(now)]
    for lease in state.leases:
        if lease not in held:
            state.free_row(lease.row)
    state.leases = held
    return min((lease.next_at for lease in held), default=inf)


def give_way(state: State) -> bool:
    """Ends the youngest lease that is not being read; returns whether it did. The receiver of the lease computes its blocks."""
    return any(lease.revoke() for lease in reversed(state.leases))


def _num_held(state: State, request: Request) -> int:
    return state.pool.held_by(request._row) if request._table is not None else 0


def give_up(state: State) -> bool:
    """Frees the blocks of the newest waiting request that holds any; returns whether there is one. It finds again what nothing has replaced."""
    holder = next((each for each in reversed(state.waiting) if _num_held(state, each)), None)
    if holder is not None:
        state.free_blocks(holder._row)
    return holder is not None


def reserve(
    state: State, request: Request, num_blocks: int, others: Sequence[Request], accepts: Callable[[Room], bool]
) -> Loading | None:
    """Takes a row, and blocks for a request's first `num_blocks`; returns None if the receiver has no room for them yet.

    others: requests on their way here that hold blocks already.
    """
    assert state.cache is not None, "the receiver of a move has a prefix cache"
    table, pool = state.table, state.cache.pool
    hashes = Prefix(request, pool, table).hashes(num_blocks)[:num_blocks]
    num_found = pool.num_on_device(hashes)
    lacking = num_blocks - num_found
    num_taken = lacking + (num_found - pool.num_in_use(hashes[:num_found]) if num_found else 0)
    if num_taken > pool.num_free or not accepts(_room(state, request, num_taken, others)):
        return None
    row = table.take_row(request.id)
    state.fit_pool()
    if num_found:
        pool.share(row, hashes[:num_found])
    pool.extend(row, lacking)
    return Loading(request, row, hashes, num_found)


def _room(state: State, request: Request, lacking: int, others: Sequence[Request]) -> Room:
    pool, waiting = state.pool, state.waiting
    live = [*state.running, *waiting, *others]
    left = (min(GROWTH, each.max_tokens - each.num_tokens) for each in (*live, request))
    promised = sum(pool.blocks_for(each.num_computed) for each in waiting)
    held = sum(_num_held(state, each) for each in waiting)
    growth = sum(blocks_for(tokens, pool.block_size) for tokens in left)
    return Room(pool.num_blocks, lacking, pool.num_free, promised, growth, not live, held)


def show(state: State, loading: Loading, now: float) -> None:
    """Makes the blocks of a row findable, which are the sender's for all iterations from now on."""
    assert state.cache is not None
    pool, (_, row, hashes, _) = state.cache.pool, loading
    pool.now = now
    pool.register(row, hashes, len(hashes))
    pool.note_holder(row, loading.request.num_tokens)


def adopt(state: State, request: Request, hashes: Sequence[BlockHash] = ()) -> None:
    """Makes a moved request wait here, with a row that continues its output and holds its blocks, which have these hashes."""
    assert state.cache is not None, "the receiver of a move has a prefix cache"
    table = state.table
    state.cache.expect([request])
    row = table.admit(spec_of(request), request._prefix and request._prefix.prompt)
    state.fit_pool()
    state.cache.pool.share(row, hashes)
    first, number = request.num_prompt_tokens, request.num_output_tokens
    table.known[row] = table.total[row] = first + number
    table.first_token_at[row], table.last_token_at[row] = request.token_times if number else (np.nan, np.nan)
    if table.tokens is not None:
        table.tokens[row, first : first + number] = request.output
    request._table, request._row = table, row
    if state.hands_over(request):  # it has come for its prompt alone, after a copy of a prefix
        table.limit[row] = first + 1
    state.wait(request)
