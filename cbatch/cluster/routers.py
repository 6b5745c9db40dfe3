"""Routers choose the replica that serves a request, from dated views of all replicas (`views`). `policies.routers` has more."""

from collections import Counter
from operator import attrgetter
from typing import NamedTuple, Protocol

from cbatch.cluster.views import ClusterView, Role
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
