"""Capacity and its interval from replications at several rates: statistics only, of any criterion.

At each rate the share of good requests has an interval from resampling replications, studentized (bootstrap-t; Efron and
Tibshirani, "An introduction to the bootstrap", 1993, section 12.5): violations come in bursts, so that a few replications hold
most of them, and percentiles of plain resampling are too narrow. Where few replications have violations at all, resampling shows
none that is worse: there the lower end also allows for one more, as bad as the worst at the next higher rate (our own rule; its
coverage: docs/capacity.md). The lower and upper ends cross the wanted level at the ends of
capacity's interval, the share itself, made monotone by isotonic regression, at the capacity. Requests are never resampled:
within a replication they are far from independent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from experiments.store.intervals import CONFIDENCE

Floats = NDArray[np.float64]

_RESAMPLES = 2000
_FEW = 10
"""Replications with violations that show what violations a replication can have."""

_MOST_ERRORS = 4.6
"""Standard errors that an end lies from the share: the exact interval of a Poisson mean reaches so far above a single event. Where
few replications have violations, resamples without any have no error to scale by."""


@dataclass(frozen=True, eq=False)
class Shares:
    """Good and asked of one criterion, [replications, rates] each, 0 asked where a rate was not simulated; rates ascend."""

    rates: Floats
    good: Floats
    asked: Floats
    level: float

    @property
    def num_replications(self) -> Any:
        """At each rate, [rates]."""
        return (self.asked > 0).sum(axis=0)

    @property
    def scarce(self) -> Any:
        """Whether violations are of fewer than `_FEW` replications, and not of all, [rates]; all that a control variate adjusted count."""
        return (self.good != self.asked).sum(axis=0) < np.minimum(self.num_replications, _FEW)

    def share(self) -> Floats:
        """The share of good requests over all replications, [rates]."""
        share: Floats = self.good.sum(axis=0) / self.asked.sum(axis=0)
        return share

    def without(self, replication: int) -> "Shares":
        kept = np.arange(len(self.good)) != replication
        return Shares(self.rates, self.good[kept], self.asked[kept], self.level)

    def only(self, replication: int) -> "Shares":
        rates = self.asked[replication] > 0
        rows = slice(replication, replication + 1)
        return Shares(self.rates[rates], self.good[rows, rates], self.asked[rows, rates], self.level)

    def crossing(self, share: Floats | None = None) -> float:
        """The rate at which the share, or another one of these rates, falls below the level; inf or 0 beyond the rates.

        Between two rates the logarithm of the violations is taken as linear.
        """
        share = self.share() if share is None else share
        share = isotonic_regression(share, weights=self.asked.sum(axis=0), increasing=False).x
        if share[0] < self.level:
            return 0.0
        if share[-1] >= self.level:
            return float("inf")
        last = int(np.flatnonzero(share >= self.level)[-1])
        least = 0.5 / self.asked.sum(axis=0).mean()  # half a violation, for a share of 1
        above, wanted, below = np.log(np.maximum(1 - np.array([share[last], self.level, share[last + 1]]), least))
        part = (wanted - above) / (below - above) if below > above else 1.0
        return float(self.rates[last] + np.clip(part, 0, 1) * (self.rates[last + 1] - self.rates[last]))

    def band(self) -> tuple[Floats, Floats]:
        """The ends of the share's interval at each rate, [rates]; from 0 to 1 with fewer than three replications.

        The share falls with the rate: the lower end at a rate holds for all below it, the upper end for all above it.
        """
        ends = np.array([_interval(good, asked) for good, asked in zip(self.good.T, self.asked.T, strict=True)])
        for index in np.flatnonzero(self.scarce):
            ends[index, 0] = min(ends[index, 0], self._low_with_worst(int(index)))
        return np.maximum.accumulate(ends[::-1, 0])[::-1], np.minimum.accumulate(ends[:, 1])

    def _low_with_worst(self, index: int) -> float:
        """The lower end at a rate if one more replication were as bad as the worst there or at the next higher rate."""
        good, asked, near = self.good[:, index], self.asked[:, index], slice(index, index + 2)
        made = self.asked[:, near] > 0
        worst = np.divide(self.good[:, near], self.asked[:, near], out=np.ones(made.shape), where=made).min()
        mean = asked[asked > 0].mean()
        return _interval(np.append(good, worst * mean), np.append(asked, mean))[0]

    def interval(self) -> tuple[float, float]:
        """The ends of the crossing's interval."""
        low, high = self.band()
        return self.crossing(low), self.crossing(high)

    def naive_interval(self) -> tuple[float, float]:
        """What it would be if requests were independent, for comparison: it covers the truth far too seldom."""
        share, num = self.share(), self.asked.sum(axis=0)
        half = 1.96 * np.sqrt(share * (1 - share) / num)
        return self.crossing(share - half), self.crossing(share + half)


def _interval(good: Floats, asked: Floats) -> tuple[float, float]:
    """Returns the interval of sum(good) / sum(asked), by the studentized bootstrap over replications."""
    good, asked = good[asked > 0], asked[asked > 0]
    num = len(good)
    if num < 3:
        return 0.0, 1.0
    weights = np.random.default_rng(num).multinomial(num, np.full(num, 1 / num), _RESAMPLES).astype(float)
    share, error = _ratio(np.ones((1, num)), good, asked)
    shares, errors = _ratio(weights, good, asked)
    differences = shares - share
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(differences == 0, 0.0, differences / errors)
    scaled = np.clip(scaled, -_MOST_ERRORS, _MOST_ERRORS)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(scaled, [tail, 1 - tail], method="nearest") * error
    return float(np.clip(share[0] - high, 0, 1)), float(np.clip(share[0] - low, 0, 1))


def _ratio(weights: Floats, good: Floats, asked: Floats) -> tuple[Any, Any]:
    """Ratios of weighted sums and their standard errors, [weightings]; weights: [weightings, replications]."""
    total = weights @ asked
    ratio = weights @ good / total
    squares = weights @ good**2 - 2 * ratio * (weights @ (good * asked)) + ratio**2 * (weights @ asked**2)
    num = len(good)
    return ratio, np.sqrt(np.maximum(squares, 0) * num / (num - 1)) / total


def capacity(criteria: Sequence[Shares]) -> tuple[float, float, float]:
    """The least crossing of the criteria, and the ends of its interval."""
    ends = [shares.interval() for shares in criteria]
    return min(map(Shares.crossing, criteria)), min(low for low, _ in ends), min(high for _, high in ends)


def by_replication(criteria: Sequence[Shares]) -> list[float]:
    """A value for each replication, whose mean is the capacity and whose scatter is its error: jackknife pseudo-values.

    Two capacities on the same replications are compared by the differences of these values.
    """
    whole, num = min(map(Shares.crossing, criteria)), len(criteria[0].good)
    without = [min(shares.without(index).crossing() for shares in criteria) for index in range(num)]
    values = whole + (num - 1) * (np.mean(without) - np.array(without))
    return [float(value) for value in values]


def alone(criteria: Sequence[Shares]) -> dict[str, float]:
    """What each replication alone would give, as a search with one run per rate does: the least and the most.

    failed: replications that fail at their lowest rate, so that theirs is below `failed_at`; passed: those that pass at their
    highest, `passed_at`. Where these rates differ, the one that holds for all. Neither is in least and most.
    """
    found, failed_at, passed_at = [], [], []
    for index in range(len(criteria[0].good)):
        each = [shares.only(index) for shares in criteria]
        value, rates = min(map(Shares.crossing, each)), each[0].rates
        if value == 0:
            failed_at.append(float(rates[0]))
        elif value == np.inf:
            passed_at.append(float(rates[-1]))
        else:
            found.append(value)
    return {
        "least": min(found, default=np.nan),
        "most": max(found, default=np.nan),
        "failed": len(failed_at),
        "failed_at": max(failed_at, default=np.nan),
        "passed": len(passed_at),
        "passed_at": min(passed_at, default=np.nan),
    }
