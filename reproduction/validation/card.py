"""The speed of one card and its host: identical cards differ by several percent, which queues multiply near saturation.

Measured over predicted time of iterations, by their number of tokens, and what launching without a graph takes, both from
runs that are then not judged.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch import BatchShape

DECODES = (16, 32, 40)
"""Requests of iterations without prompts up to which each factor holds."""
TOKENS = (256, 512, 1024, 1536, 2047, 2048, 3072)
"""Tokens of iterations with prompts, likewise; full chunks of 2,048 run in a graph of their size."""

_FEWEST = 4  # iterations that tell a factor; with fewer, all with or without prompts tell it
Times = NDArray[np.float64]


class CardSpeed(NamedTuple):
    """Factors of the profile's iteration times: of decodes alone by `DECODES`, and of iterations with prompts by `TOKENS`.

    eager_seconds: see `HostTime`; None: the profile's.
    """

    decodes: tuple[float, ...] = (1.0,) * (len(DECODES) + 1)
    prompts: tuple[float, ...] = (1.0,) * (len(TOKENS) + 1)
    eager_seconds: float | None = None

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

    def factors(prompts: bool, number: int) -> tuple[float, ...]:
        parts = [sums[prompts, place] for place in range(number)]
        whole = list(chain.from_iterable(parts)) or [(1.0, 1.0)]
        totals = [np.sum(part if len(part) >= _FEWEST else whole, axis=0) for part in parts]
        return tuple(float(real / predicted) for real, predicted in totals)

    return CardSpeed(factors(False, len(DECODES) + 1), factors(True, len(TOKENS) + 1))


def eager_seconds(launches: Iterable[tuple[bool, float]]) -> float | None:
    """Returns by how much launching without a graph takes longer. launches: (without a graph, host seconds), of prompts."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for eager, taken in launches:
        seconds[eager].append(taken)
    if min(map(len, seconds.values())) < _FEWEST:
        return None
    return max(float(np.median(seconds[True]) - np.median(seconds[False])), 0.0)


def _kind(shape: BatchShape) -> tuple[bool, int]:
    """Whether there are prompts, and the place of the factor."""
    prompts = bool(shape.chunks)
    return prompts, int(np.searchsorted(TOKENS if prompts else DECODES, shape.num_tokens))
