"""The speed of one card: identical cards differ by several percent, which queues multiply near saturation.

Measured over predicted time of iterations, by their number of tokens, from runs that are then not judged.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch import BatchShape

EDGES = (256, 512, 1024, 1536, 2047, 2048, 3072)
"""Tokens of iterations with prompts up to which each factor holds; full chunks of 2,048 run in a graph of their size."""

_FEWEST = 4  # iterations that tell a factor
Times = NDArray[np.float64]


class CardSpeed(NamedTuple):
    """Factors of the profile's iteration times: of decodes alone, and of iterations with prompts by `EDGES`."""

    decodes: float = 1.0
    prompts: tuple[float, ...] = (1.0,) * (len(EDGES) + 1)

    def factor(self, shape: BatchShape) -> float:
        return self.prompts[_bin(shape)] if shape.chunks else self.decodes


AS_MEASURED = CardSpeed()
"""The card of the profile."""


def card_speed(runs: Iterable[tuple[list[BatchShape], Times, Times]]) -> CardSpeed:
    """Returns the speed of the card that served these runs: their shapes, measured and predicted device seconds."""
    bins, real, predicted = [], [], []
    for shapes, measured, expected in runs:
        bins += [_bin(shape) if shape.chunks else -1 for shape in shapes]
        real.append(measured)
        predicted.append(expected)
    kinds, total, expected = np.array(bins), np.concatenate(real), np.concatenate(predicted)
    chosen = [kinds == kind for kind in range(-1, len(EDGES) + 1)]
    found = [float(total[rows].sum() / expected[rows].sum()) if rows.sum() >= _FEWEST else 1.0 for rows in chosen]
    return CardSpeed(found[0], tuple(found[1:]))


def _bin(shape: BatchShape) -> int:
    return int(np.searchsorted(EDGES, shape.num_tokens))
