"""Marconi (arXiv 2411.19379): recency, and the floating-point operations that a block saves per byte.

The paper tunes `alpha` by replaying a window of requests. Here `alpha` is a constant, so that a sweep can show its effect.
"""

from collections.abc import Sequence
from math import inf

from cbatch import CachedBlock, ConfigError, Eviction


class Marconi(Eviction):
    """Evicts the lowest utility: `alpha` * (operations saved per byte) + 1 / (seconds since the release), both scaled to 0..1."""

    dynamic = True

    def __init__(self, alpha: float = 1.0) -> None:
        """alpha: weight of the operations; 0 is LRU. Raises ConfigError if alpha is below 0 or not finite."""
        if not 0 <= alpha < inf:
            raise ConfigError(f"alpha={alpha} must be finite, and at least 0")
        self.alpha = alpha

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[float]:
        # Blocks have equal bytes. A layer takes a * l + b * l^2 operations for l tokens: scaled, a block's share is start + end.
        return self.utilities(
            [block.start + block.end for block in blocks], [now - block.released_at for block in blocks]
        )

    def utilities(self, saved: Sequence[float], ages: Sequence[float]) -> Sequence[float]:
        """Returns the utility of each block. saved: operations per byte, in any unit. ages: seconds since the release."""
        recent = scaled([1 / max(age, 1e-9) for age in ages])
        return [self.alpha * share + recency for share, recency in zip(scaled(saved), recent, strict=True)]


def scaled(values: Sequence[float]) -> Sequence[float]:
    """Maps the lowest value to 0 and the highest to 1; maps all values to 1 if they are equal."""
    lowest, highest = min(values, default=0), max(values, default=0)
    return [(value - lowest) / (highest - lowest) if highest > lowest else 1.0 for value in values]
