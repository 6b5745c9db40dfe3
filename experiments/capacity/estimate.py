"""Estimates a capacity and its interval from replications at several rates: statistics only.

At each rate the share of good requests has an interval from resampling replications, studentized (bootstrap-t; Efron and
Tibshirani, "An introduction to the bootstrap", 1993, section 12.5). Violations come in bursts: a few replications hold most of
them, so percentiles of plain resampling are too narrow. Requests are never resampled, as they are not independent within a
replication. If few replications have violations, resampling cannot show a worse one: the lower end then allows for one more
replication, as bad as the worst at the next higher rate (our own rule; its coverage: docs/capacity.md).

The share, made monotone by isotonic regression, crosses the wanted level at the capacity. The ends of the share's interval cross it
at the ends of the capacity's interval. A search that ends once its interval is narrow widens it to the width that it was to reach (Chow and
Robbins, "On the asymptotic theory of fixed-width sequential confidence intervals for the mean", Ann. Math. Statist. 36, 1965).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from cbatch.results.metrics import Floats
from experiments.report.intervals import CONFIDENCE

_RESAMPLES = 2000
_FEW = 10  # fewest replications with violations that show how many violations a replication can have

_CHANCE = 1.25  # by how much chance makes the interval too narrow at which a search ends, at most

_MOST_ERRORS = 4.6
"""Most standard errors between the share and an end of its interval, as far as the exact interval of a Poisson mean reaches above a
single event. A limit is needed because resamples without violations have no error to scale by."""


@dataclass(frozen=True, eq=False)
class Shares:
    """Counts of requests.

    rates: in ascending order. good, total: requests that meet their objectives, and all of them, [replications, rates];
    the total is 0 for a replication that was not simulated at a rate. level: the wanted share. step: of rates that have none between them.
    """

    rates: Floats
    good: Floats
    total: Floats
    level: float
    step: float = 0.0

    @property
    def num_replications(self) -> Any:
        """Replications at each rate, [rates]."""
        return (self.total > 0).sum(axis=0)

    @property
    def scarce(self) -> Any:
        """Whether too few replications have violations, [rates]: fewer than `_FEW`, and not all. An adjusted value counts as a violation."""
        return (self.good != self.total).sum(axis=0) < np.minimum(self.num_replications, _FEW)

    def share(self) -> Floats:
        """Returns the share of good requests over all replications, [rates]."""
        share: Floats = self.good.sum(axis=0) / self.total.sum(axis=0)
        return share

    def only(self, replications: Any) -> "Shares":
        """Returns the counts of the replications that a mask selects, at the rates at which any of them was simulated."""
        good, total = self.good[replications], self.total[replications]
        rates = total.any(axis=0)
        return replace(self, rates=self.rates[rates], good=good[:, rates], total=total[:, rates])

    def crossing(self, share: Floats | None = None, end: int | None = None) -> float:
        """Returns the rate at which the share falls below the level; 0 or inf if it does so beyond the rates.

        share: at each rate, [rates]; None: `share()`. Between two rates the logarithm of the violations is linear, unless they jump there, from less
        than a tenth of those allowed to more than half of the requests. Then the rate is known no better than to lie between them. end: 0 or 1, the lower or higher of them.
        """
        share = self.share() if share is None else share
        share = isotonic_regression(share, weights=self.total.sum(axis=0), increasing=False).x
        if share[0] < self.level:
            return 0.0
        if share[-1] >= self.level:
            return float("inf")
        last = int(np.flatnonzero(share >= self.level)[-1])
        least = 0.5 / self.total.sum(axis=0).mean()  # half a violation, for a share of 1
        above, wanted, below = np.log(np.maximum(1 - np.array([share[last], self.level, share[last + 1]]), least))
        part = (wanted - above) / (below - above) if below > above else 1.0
        is_jump = share[last] > 1 - 0.1 * (1 - self.level) and share[last + 1] < 0.5
        if end is not None and is_jump and self.rates[last + 1] - self.rates[last] > self.step:
            part = end
        return float(self.rates[last] + np.clip(part, 0, 1) * (self.rates[last + 1] - self.rates[last]))

    def band(self) -> tuple[Floats, Floats]:
        """Returns the ends of the share's interval at each rate, [rates]; 0 and 1 with fewer than three replications.

        The share falls with the rate: a lower end holds for all lower rates, an upper end for all higher rates.
        """
        ends = np.array([_interval(good, total) for good, total in zip(self.good.T, self.total.T, strict=True)])
        for index in np.flatnonzero(self.scarce):
            ends[index, 0] = min(ends[index, 0], self._low_with_worst(int(index)))
        return np.maximum.accumulate(ends[::-1, 0])[::-1], np.minimum.accumulate(ends[:, 1])

    def _low_with_worst(self, index: int) -> float:
        """Returns the lower end at a rate if one more replication were as bad as the worst there or at the next higher rate."""
        good, total, near = self.good[:, index], self.total[:, index], slice(index, index + 2)
        made = self.total[:, near] > 0
        worst = np.divide(self.good[:, near], self.total[:, near], out=np.ones(made.shape), where=made).min()
        mean = total[total > 0].mean()
        return _interval(np.append(good, worst * mean), np.append(total, mean))[0]

    def interval(self) -> tuple[float, float]:
        """Returns the ends of the crossing's interval."""
        low, high = self.band()
        return self.crossing(low, 0), self.crossing(high, 1)

    def jump(self) -> tuple[float, float] | None:
        """Returns the rates between which violations jump, see `crossing`; None if they rise gradually."""
        low, high = self.crossing(end=0), self.crossing(end=1)
        return (low, high) if low < high else None

    def by_replication(self) -> list[float]:
        """Returns a jackknife pseudo-value for each replication: their mean is the crossing, their scatter gives its error.

        The differences of these values compare two capacities on the same replications.
        """
        num = len(self.good)
        without = np.array([self.only(kept).crossing() for kept in ~np.eye(num, dtype=bool)])
        values: list[float] = (self.crossing() + (num - 1) * (without.mean() - without)).tolist()
        return values


@dataclass(frozen=True, eq=False)
class Capacity:
    """A capacity in requests per second, or in concurrent sessions, its interval, and the shares that it rests on."""

    rate: float
    low: float
    high: float
    shares: Shares
    requests: int
    warmup: int

    @property
    def accuracy(self) -> float:
        return (self.high - self.low) / 2 / self.rate if 0 < self.low <= self.high < inf else inf

    def widened(self, accuracy: float) -> "Capacity":
        """Returns the capacity with an interval of ±accuracy, or of a quarter more than its own width if that is narrower: see the module."""
        reach = min(accuracy, _CHANCE * self.accuracy) * self.rate
        return replace(self, low=min(self.low, self.rate - reach), high=max(self.high, self.rate + reach))


def _interval(good: Floats, total: Floats) -> tuple[float, float]:
    """Returns the interval of sum(good) / sum(total), by the studentized bootstrap over replications."""
    good, total = good[total > 0], total[total > 0]
    num = len(good)
    if num < 3:
        return 0.0, 1.0
    weights = _resample(num)
    share, error = _ratio(np.ones((1, num)), good, total)
    shares, errors = _ratio(weights, good, total)
    differences = shares - share
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(differences == 0, 0.0, differences / errors)
    scaled = np.clip(scaled, -_MOST_ERRORS, _MOST_ERRORS)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(scaled, [tail, 1 - tail], method="nearest") * error
    return float(np.clip(share[0] - high, 0, 1)), float(np.clip(share[0] - low, 0, 1))


@lru_cache(4)
def _resample(num: int) -> Floats:
    """Returns how often each of `num` replications is drawn, [resamples, num]: the same for all rates."""
    return np.random.default_rng(num).multinomial(num, np.full(num, 1 / num), _RESAMPLES).astype(float)


def _ratio(weights: Floats, good: Floats, total: Floats) -> tuple[Any, Any]:
    """Returns ratios of weighted sums and their standard errors, [weightings]. weights: [weightings, replications]."""
    sums = weights @ total
    ratio = weights @ good / sums
    squares = weights @ good**2 - 2 * ratio * (weights @ (good * total)) + ratio**2 * (weights @ total**2)
    num = len(good)
    return ratio, np.sqrt(np.maximum(squares, 0) * num / (num - 1)) / sums
