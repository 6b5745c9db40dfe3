"""Consistent hashing with bounded loads (Mirrokni et al., SODA 2018): the session's replica, or the next one that is not too loaded.

With m unfinished requests on n replicas, none gets more than ceil(factor * (m + 1) / n). From the key's position on the circle the
first replica below this bound is taken. factor=1 nearly balances requests; a large factor is plain consistent hashing.
The key is the session; without one the client, else the request. Positions are blake2b's, 100 points per replica.
"""

from fractions import Fraction

from cbatch import ConfigError, Request
from cbatch.cluster import ClusterView
from policies.shared.hash_ring import position_of, ring_of


class BoundedLoads:
    depends_on = ("sessions",)

    def __init__(self, factor: float = 1.25) -> None:
        if not factor >= 1:
            raise ConfigError(f"router: {factor=} must be at least 1")
        self.factor = factor

    def choose(self, request: Request, view: ClusterView) -> int:
        loads = {index: view[index].num_unfinished for index in view.fitting(request)}
        key = request.session or request.client or str(request.id)
        most = bound(loads, self.factor)
        around = ring_of(len(view)).clockwise(position_of(key))
        return next(index for index in around if index in loads and loads[index] < most)


def bound(loads: dict[int, int], factor: float) -> int:
    """Returns the requests that a replica may have, the arriving one included. The ceiling is computed in decimal."""
    return -int(-Fraction(str(factor)) * (sum(loads.values()) + 1) // len(loads))
