"""Random: each replica with equal probability, from a seeded generator."""

from random import Random

from cbatch import Request
from cbatch.cluster import ClusterView


class RandomChoice:
    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(self, request: Request, view: ClusterView) -> int:
        return self._random.choice(view.fitting(request))
