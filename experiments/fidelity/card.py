"""The speed of one card: identical cards differ by several percent, which queues multiply near saturation.

Measured over predicted time of iterations, by their number of tokens, from runs that are then not judged.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch import BatchShape

DECODES = (16, 32, 40)
"""Requests of iterations without prompts up to which each factor holds."""
TOKENS = (256, 512, 1024, 1536, 2047, 2048, 3072)
"""Tokens of iterations with prompts, likewise; full chunks of 2,048 run in a graph of their size."""

_FEWEST = 4  # iterations that tell a factor
Times = NDArray[np.float64]


class CardSpeed(NamedTuple):
    """Factors of the profile's iteration times: of decodes alone by `DECODES`, and of iterations with prompts by `TOKENS`."""

    decodes: tuple[float, ...] = (1.0,) * (len(DECODES) + 1)
    prompts: tuple[float, ...] = (1.0,) * (len(TOKENS) + 1)

    def factor(self, shape: BatchShape) -> float:
        prompts, place = _kind(shape)
        return (self.prompts if prompts else self.decodes)[place]


AS_MEASURED = CardSpeed()
"""The card of the profile."""


def card_speed(runs: Iterable[tuple[list[BatchShape], Times, Times]]) -> CardSpeed:
    """Returns the speed of the card that served these runs: their shapes, measured and predicted device seconds."""
    sums: dict[tuple[bool, int], list[tuple[float, float]]] = defaultdict(list)
    for shapes, measured, predicted in runs:
        for shape, *seconds in zip(shapes, measured.tolist(), predicted.tolist(), strict=True):
            sums[_kind(shape)].append((seconds[0], seconds[1]))

    def factor(*kind: Any) -> float:
        real, predicted = np.sum(sums[kind], axis=0) if len(sums[kind]) >= _FEWEST else (1.0, 1.0)
        return float(real / predicted)

    decodes = tuple(factor(False, place) for place in range(len(DECODES) + 1))
    return CardSpeed(decodes, tuple(factor(True, place) for place in range(len(TOKENS) + 1)))


def _kind(shape: BatchShape) -> tuple[bool, int]:
    """Whether there are prompts, and the place of the factor."""
    prompts = bool(shape.chunks)
    return prompts, int(np.searchsorted(TOKENS if prompts else DECODES, shape.num_tokens))
