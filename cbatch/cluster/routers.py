"""Routers choose the replica that serves a request; a `Replica` is a router's view of one."""

from collections.abc import Sequence
from typing import Protocol

from cbatch.engine import Engine
from cbatch.errors import ConfigError
from cbatch.kv import KVView
from cbatch.request import Request, Status


class Replica:
    """A router's view of a replica: its unfinished requests and its KV cache. Counters include iterations in flight."""

    def __init__(self, engine: Engine) -> None:
        self.kv: KVView = engine.view.kv
        self._engine = engine
        self._requests: list[Request] = []  # unfinished ones, and some that have ended since the last look
        self._new: list[Request] = []  # routed, and not submitted yet
        self._outstanding: int | None = None

    @property
    def requests(self) -> Sequence[Request]:
        """The requests routed to this replica that have not ended, in the order of their arrival."""
        self._requests = [request for request in self._requests if request.status is not Status.FINISHED]
        return self._requests

    @property
    def num_unfinished(self) -> int:
        return self._engine.num_unfinished + len(self._new)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no KV blocks: not admitted yet, or preempted."""
        return sum(request.status is not Status.RUNNING for request in self.requests)

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of prompts and outputs not computed yet; outputs by their limit, as their true length is hidden."""
        if self._outstanding is None:
            self._outstanding = sum(request.max_tokens - request.num_computed for request in self.requests)
        return self._outstanding

    @property
    def prompt_tokens_left(self) -> int:
        """Tokens that the prompts of these requests still lack, beyond what is computed or cached."""
        return sum(max(request.num_prompt_tokens - request.num_computed, 0) for request in self.requests)

    def cached_tokens(self, request: Request) -> int:
        """Returns the prompt tokens of an arriving request that this replica's prefix cache holds now; 0 without one."""
        cache = self._engine.state.cache
        return 0 if cache is None else cache.num_cached(request)

    def take(self, request: Request) -> None:
        """Routes a request to this replica; for `Cluster`."""
        if self._outstanding is not None:
            self._outstanding += request.max_tokens
        self._requests.append(request)
        self._new.append(request)

    def submit(self) -> None:
        """Submits the requests taken; for `Cluster`."""
        self._engine.submit(self._new)
        self._new, self._outstanding = [], None


class Router(Protocol):
    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        """Returns the index of the replica for a request that arrives."""


class RoundRobin:
    """Takes the replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        chosen = self._next % len(replicas)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """Chooses the replica with the fewest unfinished requests, the first on a tie."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        return min(range(len(replicas)), key=lambda index: replicas[index].num_unfinished)


class LMetric:
    """Chooses the smallest product of the prompt tokens to compute there and the batch there (LMetric, arXiv 2603.15202).

    To compute are the request's tokens that the replica has not cached and all that its unfinished requests lack, at least 1;
    the batch counts the request. On a tie, which the paper leaves open, the first replica is taken.
    """

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        def product(index: int) -> int:
            replica = replicas[index]
            new = request.num_prompt_tokens - replica.cached_tokens(request)
            return max(new + replica.prompt_tokens_left, 1) * (replica.num_unfinished + 1)

        return min(range(len(replicas)), key=product)


def make_router(router: str | Router) -> Router:
    """Returns the router `round_robin`, `least_loaded` or `lmetric`, or a router itself; raises ConfigError for anything else."""
    routers: dict[str, type[Router]] = {"round_robin": RoundRobin, "least_loaded": LeastLoaded, "lmetric": LMetric}
    if not isinstance(router, str):
        if not callable(getattr(router, "choose", None)):
            raise ConfigError(f"backend.router: {type(router).__name__} has no method choose(request, replicas)")
        return router
    if router not in routers:
        external = "one of yours with backend.router._target_=my_module.MyRouter"
        raise ConfigError(f"backend.router={router} is unknown; choose {', '.join(routers)}, or {external}")
    return routers[router]()
