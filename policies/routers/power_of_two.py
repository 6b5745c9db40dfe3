"""Power of two choices: of two different replicas, drawn from a seeded generator, the one with fewer unfinished requests.

Source: Mitzenmacher, IEEE TPDS 12(10), 2001. Ties: the replica drawn first.
"""

from random import Random

from cbatch import Request
from cbatch.cluster import ClusterView


class PowerOfTwo:
    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(self, request: Request, view: ClusterView) -> int:
        able = view.fitting(request)
        drawn = self._random.sample(able, min(2, len(able)))
        return min(drawn, key=lambda index: view[index].num_unfinished)
