"""Intervals of means over independent replications, such as the seeds of a sweep: Student's t, and differences in pairs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95


class Mean(NamedTuple):
    """A mean, half the width of its 95% interval (NaN from one value alone), and the number of values."""

    mean: float
    half: float
    number: int

    @property
    def ends(self) -> tuple[float, float]:
        return self.mean - self.half, self.mean + self.half

    def times(self, factor: float) -> "Mean":
        """In another unit."""
        return Mean(factor * self.mean, factor * self.half, self.number)


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of independent values, with the t interval; NaN values are left out."""
    known = np.array([value for value in values if not math.isnan(value)], dtype=float)
    if not len(known):
        return Mean(math.nan, math.nan, 0)
    half = t_quantile(len(known)) * float(known.std(ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan
    return Mean(float(known.mean()), half, len(known))


def t_quantile(number: int) -> float:
    """Returns the standard errors by which the interval of a mean of `number` values reaches to each side."""
    return float(stdtrit(number - 1, (1 + CONFIDENCE) / 2))
