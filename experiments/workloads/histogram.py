"""Draws from a discrete distribution."""

import numpy as np

from experiments.workloads.trace import Floats, Ints


class Histogram:
    """Integer values [bins] and how often each occurs: weights [bins], none negative; they need not sum to 1."""

    def __init__(self, values: Ints, weights: Floats) -> None:
        self.values = values
        cumulative = np.cumsum(weights)
        self._cumulative = cumulative / cumulative[-1]

    def draw(self, generator: np.random.Generator, num: int) -> Ints:
        """Values drawn independently, [num]; a draw is a prefix of any longer one from the same generator state."""
        return self.values[np.searchsorted(self._cumulative, generator.random(num), side="right")]
