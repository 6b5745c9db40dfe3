"""Routers choose the replica that serves a request, from dated views of all replicas (`views`)."""

from typing import Protocol

from cbatch.cluster.views import ClusterView
from cbatch.errors import ConfigError
from cbatch.request import Request


class Router(Protocol):
    """A method `on_end(request)`, if there is one, is called when the end of a request has become known, before the next choice."""

    def choose(self, request: Request, view: ClusterView) -> int:
        """Returns the index in `view` of the replica for a request that arrives at `view.now`."""


class RoundRobin:
    """Takes the replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, view: ClusterView) -> int:
        able = view.fitting(request)
        chosen = next((index for index in able if index >= self._next), able[0])
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """Chooses the replica with the fewest unfinished requests, the first on a tie."""

    def choose(self, request: Request, view: ClusterView) -> int:
        return min(view.fitting(request), key=lambda index: view[index].num_unfinished)


class LMetric:
    """Chooses the smallest product of the work and the batch there (LMetric, arXiv 2603.15202).

    Work = uncached prompt tokens of this request + remaining prompt tokens there, at least 1. The batch counts this request. On a
    tie, which the paper leaves open, the first replica is taken.
    """

    def choose(self, request: Request, view: ClusterView) -> int:
        def product(index: int) -> int:
            replica = view[index]
            uncached = request.num_prompt_tokens - replica.cached_tokens(request)
            return max(uncached + replica.prompt_tokens_left, 1) * (replica.num_unfinished + 1)

        return min(view.fitting(request), key=product)


def make_router(router: str | Router) -> Router:
    """Returns the router `round_robin`, `least_loaded` or `lmetric`, or a router itself; raises ConfigError for anything else."""
    routers: dict[str, type[Router]] = {"round_robin": RoundRobin, "least_loaded": LeastLoaded, "lmetric": LMetric}
    if not isinstance(router, str):
        if not callable(getattr(router, "choose", None)):
            raise ConfigError(f"backend.router: {type(router).__name__} has no method choose(request, view)")
        return router
    if router not in routers:
        from cbatch.validation import nearest  # loads pydantic

        yours = "for yours give the import path of its class, backend.router=my_module.MyRouter"
        raise ConfigError(f"backend.router={router}: no such router; {nearest(router, routers)}; {yours}")
    return routers[router]()
