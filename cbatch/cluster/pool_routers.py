"""Routers of pools, inside the router of the cluster.

request -> the cluster's router: any replica of the wanted pool -> the pool's router: one of the pool's replicas
"""

from collections.abc import Mapping
from typing import Any

from cbatch.cluster.routers import Reject, Route, Router
from cbatch.cluster.views import ClusterView, Role
from cbatch.errors import PolicyError, call
from cbatch.policy import name_of
from cbatch.request import Request


class PoolRouters:
    """The router of a cluster in which pools have routers of their own.

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
