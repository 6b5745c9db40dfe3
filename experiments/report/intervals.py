"""Confidence intervals of means over independent replications, such as a sweep's seeds: Student's t, and paired differences."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cbatch import ConfigError

CONFIDENCE = 0.95
_POWER = 0.8
_KNOWN_VARIANCE = 2.80158  # standard errors of a difference that a test with known variance shows with this power
_ENOUGH = 5  # replications; their interval is 1.4 times as wide as with a known variance
_DIGITS = 9  # significant digits; further digits depend on the order of summation


def significant(value: float) -> float:
    """Rounds off the digits of a figure that rounding errors may change."""
    return float(f"{value:.{_DIGITS}g}")


def _without_rounding(value: float, scale: float) -> float:
    """Returns 0 if rounding alone may cause this difference or error between figures of size `scale`, else the value."""
    return 0.0 if abs(value) <= abs(scale) * 10**-_DIGITS else value


class Mean(NamedTuple):
    """A mean, half the width of its 95% interval (NaN for a single value), and the number of values."""

    mean: float
    half: float
    number: int


def mean_of(values: Sequence[float]) -> Mean:
    """Returns the mean of independent values with its t interval. NaN values are left out."""
    known = np.array([value for value in values if not math.isnan(value)], dtype=float)
    if not len(known):
        return Mean(math.nan, math.nan, 0)
    mean = float(known.mean())
    half = t_quantile(len(known)) * float(known.std(ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan
    return Mean(mean, _without_rounding(half, mean), len(known))


def t_quantile(number: int) -> float:
    """Returns half the width of the interval of a mean of `number` values, in standard errors."""
    from scipy.special import stdtrit  # slow to import

    return float(stdtrit(number - 1, (1 + CONFIDENCE) / 2))


def few_text(numbers: Iterable[int], advise: bool = True) -> str:
    """Describes how much a few replications widen an interval; empty if all means have five or more. numbers: replications of each mean. advise: whether to say how many to run."""
    fewest = min((number for number in numbers if number > 1), default=_ENOUGH)
    if fewest >= _ENOUGH:
        return ""
    reach = t_quantile(fewest)
    wider = f"{reach:.3g} standard errors to each side, {reach / t_quantile(10**6):.1f} times as far as with many"
    return f"with {fewest} runs a 95% interval reaches {wider}{f'; use seeds={_ENOUGH} or more' * advise}"


class Compared(NamedTuple):
    """Compares two means: second / first and second - first, with the ends of their intervals; NaN of a single replication."""

    ratio: tuple[float, float, float]
    difference: tuple[float, float, float]
    number: int
    paired: bool

    def alone(self) -> "Compared":
        """Returns the comparison of replications that are all equal, and so a single one."""
        ratio, difference = ((value, math.nan, math.nan) for value, *_ in (self.ratio, self.difference))
        return self._replace(ratio=ratio, difference=difference, number=1)

    def scaled(self, factor: float) -> "Compared":
        """Returns the comparison for values multiplied by `factor`."""
        value, low, high = self.difference
        return self._replace(difference=(factor * value, factor * low, factor * high))

    @property
    def p(self) -> float:
        """The probability of so large a difference if there is none (two-sided t test): below 0.05 where 0 is outside the interval; NaN of a single replication."""
        from scipy.special import stdtr  # loaded only where needed

        if self.number < 2:
            return math.nan
        difference, low, high = self.difference
        if low == high:
            return float(difference == 0)
        return float(2 * stdtr(self.number - 1, -abs(difference) / ((high - low) / 2) * t_quantile(self.number)))

    @property
    def needed(self) -> float:
        """The fewest replications of which the same test shows a difference of this size with a power of 80%; infinite for no difference."""
        from scipy.special import nctdtr  # loaded only where needed

        difference, low, high = self.difference
        if not difference:
            return math.inf
        errors = 2 * abs(difference) / (high - low) * t_quantile(self.number) if high > low else math.inf
        effect = errors / math.sqrt(self.number)  # in standard deviations of one replication
        number = max(2, math.ceil((_KNOWN_VARIANCE / effect) ** 2))
        while number < 10_000 and nctdtr(number - 1, effect * math.sqrt(number), t_quantile(number)) > 1 - _POWER:
            number += 1  # an estimated variance needs two more, or several where two are few
        return number

    @property
    def significant(self) -> bool:
        return self.number > 1 and not self.difference[1] <= 0 <= self.difference[2]


def holm(results: Sequence[Compared]) -> list[float]:
    """Returns p values corrected for the number of tests (Holm, Scand. J. Statistics 1979), whatever their dependence.

    Comparisons with the same difference and interval, as of two policies with equal schedules, are one test. Those of equal means
    in all replications are none, since they can reject nothing (Tarone, Biometrics 1990), nor are those of one replication.
    """
    tests = {result.difference: result.p for result in results if any(result.difference) and result.number > 1}
    corrected, worst = dict[tuple[float, float, float], float](), 0.0
    for rank, test in enumerate(sorted(tests, key=tests.__getitem__)):
        corrected[test] = worst = max(worst, min((len(tests) - rank) * tests[test], 1.0))
    return [corrected.get(result.difference, result.p) for result in results]


def holm_text(results: Sequence[Compared]) -> str:
    """Returns how many significant differences remain after a correction for the number of tests; empty for one difference, or none."""
    results = [result for result in results if result.number > 1]
    if len(results) < 2 or not (found := sum(result.significant for result in results)):
        return ""
    remain = sum(p < 1 - CONFIDENCE for p in holm(results))
    num_tests = len({result.difference for result in results if any(result.difference)})
    fewer = "; equal outcomes are one test, and equal figures none" * (num_tests < len(results))
    tests = f"{num_tests} test{'s' * (num_tests != 1)} (Holm{fewer})"
    return f"{found} of {len(results)} differences are significant, {remain} of them corrected for {tests}"


def compare(first: Mapping[Any, float], second: Mapping[Any, float], paired: bool) -> Compared:
    """Compares means over replications. paired: replications with the same number served the same requests.

    The ratio's interval is computed on its logarithm, to first order (delta method). Raises ConfigError for fewer than two replications.
    """
    common = sorted(first.keys() & second.keys())
    a, b = np.array(list(first.values())), np.array(list(second.values()))
    if paired := paired and len(common) > 1:
        a, b = np.array([first[key] for key in common]), np.array([second[key] for key in common])
    number = min(len(a), len(b))
    if number < 2:
        raise ConfigError("one seed gives no interval; run again with more seeds: experiments.run -m seeds=20 ...")
    difference = _without_rounding(float(b.mean() - a.mean()), a.mean())
    error = _without_rounding(_error(a, b, paired), a.mean())
    t = t_quantile(number)
    ends = difference - t * error, difference + t * error
    ratio = float(b.mean() / a.mean() if difference else 1.0) if a.mean() else math.nan
    relative = t * _without_rounding(_error(a / a.mean(), b / b.mean(), paired), 1.0) if ratio > 0 else math.nan
    relative = min(relative, 700.0)  # beyond which exp overflows
    bounds = (ratio * math.exp(-relative), ratio * math.exp(relative))
    return Compared((ratio, *bounds), (difference, *ends), number, paired)


def _error(a: Any, b: Any, paired: bool) -> float:
    """Returns the standard error of the difference between two means."""
    if paired:
        return float((b - a).std(ddof=1)) / math.sqrt(len(a))
    return math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
