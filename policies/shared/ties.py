"""Choice among replicas of equal score."""

from collections.abc import Mapping
from random import Random

from cbatch import ConfigError


class Ties:
    """Takes the replica with the largest score. Ties: `random`, each with equal probability from a seeded generator, or `first`."""

    def __init__(self, ties: str, seed: int) -> None:
        if ties not in ("random", "first"):
            raise ConfigError(f"router: {ties=} must be random or first")
        self._ties, self._random = ties, Random(seed)

    def largest(self, scores: Mapping[int, float]) -> int:
        """scores: by index, lowest index first."""
        best = max(scores.values())
        equal = [index for index, score in scores.items() if score == best]
        return equal[0] if self._ties == "first" else self._random.choice(equal)
