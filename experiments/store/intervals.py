"""Intervals of means over independent replications, such as the seeds of a sweep: Student's t, and differences in pairs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cbatch import ConfigError

CONFIDENCE = 0.95
_POWER = 0.84  # standard errors for a power of 80%
_ENOUGH = 5  # replications: the interval of so many is 1.4 times as wide as with a known variance
_DIGITS = 9  # of a figure; beyond them, sums of the same terms in another order differ


def significant(value: float) -> float:
    """Returns a figure without the digits that rounding errors may change."""
    return float(f"{value:.{_DIGITS}g}")


def _without_rounding(value: float, scale: float) -> float:
    """Returns 0 for a difference, or an error, of figures of this size that may come from rounding alone."""
    return 0.0 if abs(value) <= abs(scale) * 10**-_DIGITS else value


class Mean(NamedTuple):
    """A mean, half the width of its 95% interval (NaN from one value alone), and the number of values."""

    mean: float
    half: float
    number: int


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of independent values, with the t interval; NaN values are left out."""
    known = np.array([value for value in values if not math.isnan(value)], dtype=float)
    if not len(known):
        return Mean(math.nan, math.nan, 0)
    mean = float(known.mean())
    half = t_quantile(len(known)) * float(known.std(ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan
    return Mean(mean, _without_rounding(half, mean), len(known))


def t_quantile(number: int) -> float:
    """Returns the standard errors by which the interval of a mean of `number` values reaches to each side."""
    from scipy.special import stdtrit  # loaded only where needed

    return float(stdtrit(number - 1, (1 + CONFIDENCE) / 2))


def few_text(numbers: Iterable[int]) -> str:
    """Says how much a few replications widen an interval; empty if no mean is over fewer than five. numbers: replications of each mean."""
    fewest = min((number for number in numbers if number > 1), default=_ENOUGH)
    if fewest >= _ENOUGH:
        return ""
    reach = t_quantile(fewest)
    wider = f"{reach:.3g} standard errors to each side, {reach / t_quantile(10**6):.1f} times as far as with many"
    return f"with {fewest} runs a 95% interval reaches {wider}; use seeds={_ENOUGH} or more"


class Compared(NamedTuple):
    """ratio, difference: of the second mean to the first: the value and the ends of its interval. needed: replications that would show it."""

    ratio: tuple[float, float, float]
    difference: tuple[float, float, float]
    number: int
    paired: bool
    needed: float

    def scaled(self, factor: float) -> "Compared":
        """Returns the comparison of values that are `factor` times these."""
        value, low, high = self.difference
        return self._replace(difference=(factor * value, factor * low, factor * high))

    @property
    def apart(self) -> bool:
        return not self.difference[1] <= 0 <= self.difference[2]


def compare(first: Mapping[Any, float], second: Mapping[Any, float], paired: bool) -> Compared:
    """Compares means over replications. paired: those with the same number served the same requests.

    The ratio's interval is that of its logarithm, to first order (the delta method). Raises ConfigError: fewer than two replications.
    """
    common = sorted(first.keys() & second.keys())
    a, b = np.array(list(first.values())), np.array(list(second.values()))
    if paired := paired and len(common) > 1:
        a, b = np.array([first[key] for key in common]), np.array([second[key] for key in common])
    number = min(len(a), len(b))
    if number < 2:
        raise ConfigError("one replication has no interval; run both with seeds=20, or give folders with several seeds")
    difference = _without_rounding(float(b.mean() - a.mean()), a.mean())
    error = _without_rounding(_error(a, b, paired), a.mean())
    t = t_quantile(number)
    ends = difference - t * error, difference + t * error
    ratio = float(b.mean() / a.mean() if difference else 1.0) if a.mean() else math.nan
    relative = t * _without_rounding(_error(a / a.mean(), b / b.mean(), paired), 1.0) if ratio > 0 else math.nan
    needed = number * ((t + _POWER) * error / difference) ** 2 if difference else math.inf
    bounds = (ratio * math.exp(-relative), ratio * math.exp(relative))
    return Compared((ratio, *bounds), (difference, *ends), number, paired, needed if error else number)


def _error(a: Any, b: Any, paired: bool) -> float:
    """The standard error of the difference of two means."""
    if paired:
        return float((b - a).std(ddof=1)) / math.sqrt(len(a))
    return math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
