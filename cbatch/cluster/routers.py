"""Routers choose the replica that serves a request, from dated views of all replicas (`views`). `policies.routers` has more."""

from collections import Counter
from collections.abc import Mapping
from operator import attrgetter, index
from typing import Any, NamedTuple, Protocol, SupportsIndex

from cbatch.cluster.views import ClusterView, Phase, Role
from cbatch.errors import PolicyError, call
from cbatch.policy import name_of
from cbatch.request import Request


class Route(NamedTuple):
    """The replicas of a request: the first computes its prompt, the second continues. Equal ones: the request stays.

    copy: a replica that sends the first one what it has cached of the prompt. Simulated clusters only.
    """

    prefill: int
    decode: int
    copy: int | None = None


class Reject(NamedTuple):
    """Ends a request at its arrival, which then counts at no replica. Simulated clusters only."""

    reason: str


class Router(Protocol):
    """Chooses the replica of each request. Where replicas have roles, it is asked again for the decoder, with another `view.stage`.

    A method `on_end(request)`, if there is one, is called when the end of a request has become known, before the next choice.

    `depends_on`: see `cbatch.Policy`. A method `accepts(room)`, if there is one, decides in place of `cbatch.moves.has_room`.
    `moves = True`: requests may move between replicas that have no roles.
    """

    def choose(self, request: Request, view: ClusterView) -> int | Route | Reject:
        """Returns the index in `view` of the replica for a request that arrives at `view.now`, or both replicas, or why it is rejected.

        A decoder is asked for at the end of the prefill, or with `Moves.push` at the arrival, if a replica was chosen that prefills only.
        """


class RoundRobin:
    """Takes the replicas in turn, prefillers and decoders each in a turn of their own."""

    def __init__(self) -> None:
        self._next = Counter[Role]()  # by stage

    def choose(self, request: Request, view: ClusterView) -> int:
        able = view.fitting(request)
        chosen = next((index for index in able if index >= self._next[view.stage]), able[0])
        self._next[view.stage] = chosen + 1
        return chosen


class LeastLoaded:
    """Joins the shortest queue: the replica with the fewest unfinished requests, or outstanding `tokens`; the first on a tie."""

    _tokens = False  # also of a subclass with an `__init__` of its own

    def __init__(self, tokens: bool = False) -> None:
        self._tokens = tokens

    def choose(self, request: Request, view: ClusterView) -> int:
        load = attrgetter("outstanding_tokens" if self._tokens else "num_unfinished")
        return min(view.fitting(request), key=lambda index: int(load(view[index])))


class CheckedRouter:
    """A router that names only replicas which can do what they are chosen for; others raise PolicyError."""

    def __init__(self, router: Router, view: ClusterView, can_move: bool) -> None:
        """can_move: whether a request can leave the replica to which it was sent."""
        self._router, self._name, self._view, self._can_move = router, name_of(router), view, can_move
        self._on_end = getattr(router, "on_end", None)

    def look(self, now: float) -> ClusterView:
        """Returns the view at a time, and tells the router which requests have ended."""
        for ended in self._view.update(now):
            if self._on_end is not None:
                call(self._where(ended), self._on_end, ended)
        return self._view

    def choose(self, shown: Request, now: float, stage: Role = Role.PREFILL) -> int | Route | Reject:
        """shown: a copy of the request that shows no progress."""
        view = self.look(now)
        view.stage = stage
        chosen: Any = call(self._where(shown), self._router.choose, shown, view)
        if isinstance(chosen, Reject):
            return chosen
        if not isinstance(chosen, Route):
            return self._check(chosen, chosen, shown, stage)
        if not self._can_move and (chosen.prefill != chosen.decode or chosen.copy is not None):
            problem = f"returned {chosen}, but requests stay where they are sent"
            remedy = "a router that moves them states moves = True in its class"
            raise PolicyError(f"{self._where(shown)}: {problem}; {remedy}")
        stays = chosen.prefill == chosen.decode  # such a replica decodes, whatever its role
        stages = Role.DECODE if stays else Role.PREFILL, Role.DECODE, Role.BOTH
        parts = zip(chosen, stages, strict=True)
        return Route(*(self._check(chosen, part, shown, role) for part, role in parts if part is not None))

    def choose_decoder(self, shown: Request, now: float) -> int:
        chosen = self.choose(shown, now, Role.DECODE)
        if isinstance(chosen, Reject):
            raise PolicyError(f"{self._where(shown)}: returned {chosen} for its decoder; reject it at its arrival")
        return chosen.decode if isinstance(chosen, Route) else chosen

    def _where(self, request: Request) -> str:
        return f"router {self._name}, request {request.id}"

    def _check(self, chosen: Any, part: Any, shown: Request, stage: Role) -> int:
        """Returns the index of a replica that can take the request; raises PolicyError if the router chose none."""
        where = self._where(shown)
        is_index = type(part) is int or (isinstance(part, SupportsIndex) and type(part) is not bool)
        if not is_index or not 0 <= index(part) < len(self._view):
            last = len(self._view) - 1
            raise PolicyError(f"{where}: choose() returned {chosen!r}; return the index of a replica, from 0 to {last}")
        view = self._view[replica := index(part)]
        if view.phase is not Phase.READY:
            problem = f"is {view.phase}"
        elif not view.fits(shown):
            problem = f"serves up to {view.max_tokens} tokens per request"
        elif Role.BOTH not in (view.role, stage) and view.role is not stage:
            problem = f"has the role {view.role}"
        else:
            return replica
        raise PolicyError(f"{where}: chose replica {replica}, which {problem}; choose from view.fitting(request)")


class PoolRouters:
    """The router of a cluster in which pools have routers of their own, which choose one of the pool's replicas after it.

    Where all replicas that can serve the request are of one such pool, as the decoders often are, the cluster's router is not asked.
    """

    def __init__(self, router: Router, of_pools: Mapping[str, Router]) -> None:
        """router: of the cluster; returns one index. of_pools: by the pool's name; pools without one take the cluster's choice."""
        self.router, self.of_pools, self.__name__ = router, dict(of_pools), name_of(router)
        self._views: dict[str, _PoolView] = {}
        self._asked: dict[int, list[Any]] = {}  # routers with `on_end`, by the request's id

    def choose(self, request: Request, view: ClusterView) -> int | Route | Reject:
        able = view.fitting(request)
        chosen: Any = able[0]
        if len({view[index].pool for index in able}) > 1 or view[chosen].pool not in self.of_pools:
            self._note(self.router, request)
            chosen = self.router.choose(request, view)
        if chosen not in able or (router := self.of_pools.get(pool := view[chosen].pool)) is None:
            return chosen  # type: ignore[no-any-return]
        if pool not in self._views:
            self._views[pool] = _PoolView(view, pool)
        own = self._views[pool].at_present()
        where = f"router {name_of(router)} of pool {pool}, request {request.id}"
        self._note(router, request)
        inside: int | Reject = call(where, router.choose, request, own)
        if isinstance(inside, Reject):
            self._asked.pop(request.id, None)
            return inside
        if inside not in own.fitting(request):
            raise PolicyError(f"{where}: choose() returned {inside!r}; return an index of view.fitting(request)")
        return own.indices[inside]

    def on_end(self, request: Request) -> None:
        for router in self._asked.pop(request.id, ()):
            router.on_end(request)

    def _note(self, router: Router, request: Request) -> None:
        if hasattr(router, "on_end") and router not in (asked := self._asked.setdefault(request.id, [])):
            asked.append(router)


class _PoolView(ClusterView):
    """The replicas of one pool, numbered from 0. indices: their numbers in the view of the cluster."""

    def __init__(self, whole: ClusterView, pool: str) -> None:
        self._whole = whole
        self.indices: list[int] = [index for index, replica in enumerate(whole) if replica.pool == pool]
        self._replicas = [whole[index] for index in self.indices]
        self._numbers = {index: number for number, index in enumerate(self.indices)}

    def at_present(self) -> "_PoolView":
        whole = self._whole
        self.now, self.num_arrived, self.least, self.stage = whole.now, whole.num_arrived, whole.least, whole.stage
        return self

    def fitting(self, request: Request, stage: Role | None = None) -> list[int]:
        able = self._whole.fitting(request, stage)
        return [self._numbers[index] for index in able if index in self._numbers]
