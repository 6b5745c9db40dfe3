"""When requests arrive in an open loop, whatever the server does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from experiments.workloads.checks import bad_setting, check_positive, is_number
from experiments.workloads.trace import Floats


class Arrivals(Protocol):
    """An arrival process."""

    def times(self, generator: np.random.Generator, num: int, /) -> Floats:
        """Arrival times in seconds, [num], never decreasing; the first is 0."""


@dataclass(frozen=True, kw_only=True)
class GammaArrivals:
    """Independent gamma-distributed intervals; with `cv` 1 a Poisson process.

    The first request arrives at 0. With one seed, another `rate` stretches time and changes nothing else.

    Fields:
        rate: requests per second.
        cv: coefficient of variation of the intervals (standard deviation / mean), 0.001 to 1000; above 1 is bursty.

    Raises:
        WorkloadError: when built, on a rate or cv out of range.
    """

    rate: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        check_positive("arrivals.rate", self.rate, "requests per second")
        if not (is_number(self.cv) and 1e-3 <= self.cv <= 1e3):
            raise bad_setting("arrivals.cv", self.cv, "give a number from 0.001 (regular) over 1 (Poisson) to 1000")

    def times(self, generator: np.random.Generator, num: int) -> Floats:
        shape = self.cv**-2
        intervals = generator.standard_gamma(shape, num - 1) / (shape * self.rate)
        return np.concatenate([[0.0], np.cumsum(intervals)])


@dataclass(frozen=True)
class AllAtOnce:
    """Every request is there at time 0: how long does a queue take to drain?"""

    def times(self, _: np.random.Generator, num: int) -> Floats:
        return np.zeros(num)
