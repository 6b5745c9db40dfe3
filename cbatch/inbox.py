"""The requests on their way to an engine from others, and the KV blocks that wait for them."""

from collections import deque
from collections.abc import Callable
from math import inf

from cbatch.moves import Loading, Moved, Room, adopt, give_up, give_way, has_room, reserve, show
from cbatch.request import Request, Status, leaves_at
from cbatch.state import State


def _end_lease(request: Request, moved: Moved) -> None:
    assert moved.lease is not None
    moved.lease.end()


class Inbox:
    """The requests on their way to an engine, each kind in the order in which they came.

    offered: given by another engine. wanted: not computed yet; the engine reserves blocks first. kept: these blocks, by the request's id.
    loading: blocks that are being copied. copied: ids of requests whose blocks have arrived; the copying thread adds them and wakes the engine.
    accepts: decides whether there is room for the next request. read: begins to copy the sender's blocks; returns whether iterations that are
    launched from now on wait for the copy: then the request is admitted at once.
    on_lost: called instead if the lease is over, with the request, the tokens of its blocks and the time.
    drop: ends the lease of a request whose client has left. free: adds the blocks kept for a request that will not use them to `freed`, once
    no copy writes to them. on_kept: called with a wanted request once its blocks are kept. on_left: called instead if its client has left
    before (`RequestSpec.timeout`); None: leaving is handled elsewhere.
    on_gave_way: called with the time when a lease of this engine's blocks has ended before it was read: this and other engines are to look again.
    take_back: called with a request whose kept blocks are needed: calls `forget` once nothing writes to them. The request's blocks are then
    read after its prefill.
    """

    def __init__(self) -> None:
        self.offered: deque[tuple[Request, Moved]] = deque()
        self.wanted: deque[Request] = deque()
        self.kept: dict[int, Loading] = {}
        self.loading: dict[int, Loading] = {}
        self.copied: deque[int] = deque()
        self._ahead = set[int]()  # ids of requests that are here before their copies have ended
        self.accepts: Callable[[Room], bool] = has_room
        self.read: Callable[[Loading, Moved, float], object] = lambda loading, moved, now: None
        self.on_lost: Callable[[Request, int, float], object] = lambda request, tokens, now: None
        self.drop: Callable[[Request, Moved], object] = _end_lease
        self.freed: list[Loading] = []
        self.free: Callable[[Loading], object] = self.freed.append
        self.on_kept: Callable[[Request, float], object] = lambda request, now: None
        self.on_gave_way: Callable[[float], object] = lambda now: None
        self.take_back: Callable[[Request], object] = self.forget
        self.on_left: Callable[[Request], object] | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.offered or self.wanted or self.kept or self.loading)

    @property
    def num_coming(self) -> int:
        """Requests that wait for blocks or for a copy, and not in the engine meanwhile."""
        copied = (each.request.status is Status.MOVING for id_, each in self.loading.items() if id_ not in self._ahead)
        return len(self.offered) + len(self.wanted) + sum(copied)

    @property
    def awaits_room(self) -> bool:
        """Whether a request waits for blocks, for which each turn looks: those set aside for running requests become fewer with each token."""
        return bool(self.offered or self.wanted)

    def take(self, state: State, now: float) -> list[Request]:
        """Returns the requests that now wait in an engine, and reserves blocks for others."""
        self._free_rows(state)
        came = self._take_copied(state, now)
        while self.offered and (began := self._begin(state, *self.offered[0], now)) is not None:
            request, _ = self.offered.popleft()
            if not began:
                adopt(state, request, self.loading[request.id].hashes if request.id in self._ahead else ())
                came.append(request)
        for request in [each for each in self.wanted if self.on_left and leaves_at(each) <= now]:
            self.turn_away(request.id)
        while self.wanted:
            request = self.wanted[0]
            loading = self._reserve(state, request, request.num_prompt_tokens // state.pool.block_size)
            if loading is None:
                break
            self.kept[request.id] = loading
            self.on_kept(self.wanted.popleft(), now)
        return came + self._take_copied(state, now)

    def _begin(self, state: State, request: Request, moved: Moved, now: float) -> bool | None:
        """Begins to read a request's blocks. Returns False if there are none, or none any more; None if there is no room for them."""
        kept = self.kept.pop(request.id, None)
        if moved.lease is not None and not moved.lease.is_over(now):
            loading = kept or self._reserve(state, request, len(moved.blocks))
            if loading is None:
                return None
            if moved.lease.begin(now):
                self.loading[request.id] = loading
                if not self.read(loading, moved, now):
                    return True
                self._ahead.add(request.id)
                show(state, loading, now)
                return False
            kept = loading
        if moved.lease is not None:
            request.lose_lease(num_tokens := len(moved.blocks) * state.pool.block_size)
            self.on_lost(request, num_tokens, now)
        if kept is not None:
            self.free(kept)
            self._free_rows(state)
        return False

    def _free_rows(self, state: State) -> None:
        while self.freed:
            state.free_row(self.freed.pop().row)

    def _reserve(self, state: State, request: Request, num_blocks: int) -> Loading | None:
        # those ahead wait in the engine already
        ahead, loading = self._ahead, (*self.loading.values(), *self.kept.values())
        others = [each.request for each in loading if each.request.id not in ahead]
        return reserve(state, request, num_blocks, others, self.accepts)

    def _take_copied(self, state: State, now: float) -> list[Request]:
        came = []
        while self.copied:
            loading = self.loading.pop(id_ := self.copied.popleft())
            if id_ in self._ahead:
                self._ahead.remove(id_)
            else:
                show(state, loading, now)
                if loading.request.status is Status.MOVING:  # its client has not left
                    adopt(state, loading.request, loading.hashes)
                    came.append(loading.request)
            state.free_row(loading.row)
        return came

    def give_way(self, state: State, now: float) -> bool:
        """Called when the engine plans nothing, perhaps for lack of room: otherwise engines could wait for each other.

        Gives up the blocks kept last if requests are offered to this engine, or it prefills some for others. Otherwise ends a lease, if
        requests are offered and no copy will bring one: a running request may need the lease's blocks, too. Otherwise frees the blocks that
        a waiting request holds; returns whether it did, so that the policy is to plan again.
        """
        if self.kept and (self.offered or any(map(state.hands_over, (*state.waiting, *state.running)))):
            self.take_back(next(reversed(self.kept.values())).request)
        elif self.offered and not self.loading and give_way(state):
            self.on_gave_way(now)
        else:
            return give_up(state)
        return False

    def withdraw(self, request: Request) -> bool:
        """Drops a request whose client has left, if it is here. Blocks that are being copied stay taken until the copy has ended."""
        for place, (offered, moved) in enumerate(self.offered):
            if offered is request:
                del self.offered[place]
                self.forget(request)
                if moved.lease is not None:
                    self.drop(request, moved)
                return True
        return request.id in self.loading

    @property
    def next_at(self) -> float:
        """Returns when to look again: when the client of a wanted request leaves."""
        return min(map(leaves_at, self.wanted), default=inf) if self.on_left else inf

    def turn_away(self, id_: int) -> None:
        """Keeps nothing for a request whose client has left, if it is wanted still."""
        for request in [each for each in self.wanted if each.id == id_]:
            self.wanted.remove(request)
            if self.on_left is not None:
                self.on_left(request)

    def forget(self, request: Request) -> None:
        """Drops a request that has ended before its blocks were sent; the next turn frees what was kept for it."""
        if request in self.wanted:
            self.wanted.remove(request)
        elif (kept := self.kept.pop(request.id, None)) is not None:
            self.free(kept)
