"""Arrival times of an open loop, independent of the server's speed."""

from dataclasses import dataclass
from typing import Annotated, Protocol, runtime_checkable

import numpy as np
from pydantic import Field

from cbatch import Described, WorkloadError
from cbatch.validation import Give, check, positive
from experiments.workloads.trace import Floats


@runtime_checkable
class Arrivals(Protocol):
    """An arrival process."""

    def times(self, generator: np.random.Generator, num: int, /) -> Floats:
        """Arrival times in seconds, [num], never decreasing; the first is 0."""


@dataclass(frozen=True, kw_only=True, repr=False)
class GammaArrivals(Described):
    """Independent gamma-distributed intervals; with `cv` 1 a Poisson process.

    The first request arrives at 0. With the same seed, another `rate` only stretches time.

    rate: requests per second.
    cv: coefficient of variation of the intervals (standard deviation / mean); above 1 is bursty.
    """

    inlined = True  # the usual arrivals: open_loop(rate=20)

    rate: Annotated[float, positive("requests per second")]
    cv: Annotated[float, Field(ge=1e-3, le=1e3), Give("a number from 0.001 (regular) over 1 (Poisson) to 1000")] = 1.0

    def __post_init__(self) -> None:
        check(self, "workload.arrivals.", WorkloadError)

    def times(self, generator: np.random.Generator, num: int) -> Floats:
        shape = self.cv**-2
        intervals = generator.standard_gamma(shape, num - 1) / (shape * self.rate)
        return np.concatenate([[0.0], np.cumsum(intervals)])


@dataclass(frozen=True, repr=False)
class AllAtOnce(Described):
    """Every request arrives at time 0: measures how long a queue takes to drain."""

    def times(self, _: np.random.Generator, num: int) -> Floats:
        return np.zeros(num)
