"""Searches a capacity: a bracket from a few replications, then many replications at rates around the crossing.

1   double or halve the rate until the attainment fails, bisect to 10%: a few replications, a single one if it decides
2   leave out the first and last requests: 5 mean residence times
3   simulate 8 replications at 4 rates around the crossing; add rates while the interval reaches beyond them, and at its wanted ends
4   add replications at the 2 to 4 nearest rates, 16 in all at least, until the interval is as narrow as wanted; widen it, as chance may have made it narrow
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, inf, sqrt

import numpy as np

from cbatch import CbatchError, ConfigError
from experiments.capacity.control import LEAST_SIMULATED, Control, Draw
from experiments.capacity.estimate import Capacity, Shares
from experiments.capacity.simulation import Outcome
from experiments.workloads.base import MOST_REQUESTS

Simulate = Callable[[Sequence[tuple[int, float]], int, int], list[Outcome]]
"""Called with pairs of (replication, rate), a number of requests and a warm-up; returns an outcome per pair."""

FIRST, LEAST = 8, 16  # replications of every rate, and of those near the crossing
_PILOT = 4  # replications of the bracket
_NARROW = 1.1  # ratio of the bracket's ends
_RATES, _MOST_RATES = 4, 20
_STEP = 1.066  # ratio of neighbouring rates
_RESIDENCE_TIMES, LEAST_PER_REQUEST = 5, 20  # left out at both ends; requests of a replication for each in the system
_AT_ONCE = 1e6  # requests per second
_IDLE, _FEW = 0.02, 200  # load at which requests are served one by one, and the requests simulated at it


@dataclass(frozen=True)
class Goal:
    """The target of a search.

    level: the wanted share of requests that meet their objectives.
    requests: per replication, at least; more if the warm-up needs them and `grows`. most: replications.
    accuracy: half the interval's width over the capacity.
    recorded: requests of the trace; None for a random workload.
    queue: draws replications for a control variate; None: without one.
    per_session: for a search over concurrent sessions instead of rates: the least requests of a replication per session; else 0.
    first: the number of sessions to try first. more: what gives a replication more requests, to try more sessions; empty if `grows`.
    """

    level: float
    requests: int
    most: int
    accuracy: float
    recorded: int | None = None
    grows: bool = False
    queue: Draw | None = None
    per_session: float = 0.0
    first: int = 8
    more: str = ""

    @property
    def unit(self) -> str:
        return "sessions" if self.per_session else "requests/s"

    def replications(self, requests: int) -> int:
        """Returns how many replications of this length there are."""
        return self.most if self.recorded is None else min(self.most, self.recorded // requests)


class TooFewError(CbatchError):
    """Raised if more replications or a coarser accuracy would give the interval, so that the simulations are worth keeping."""


class Search:
    """One search. log: receives a line after each step."""

    def __init__(self, goal: Goal, simulate: Simulate, log: Callable[[str], None]) -> None:
        self.goal, self.simulate, self.log = goal, simulate, log
        self.requests, self.most = goal.requests, goal.replications(goal.requests)
        self.outcomes: list[Outcome] = []
        self._pilots: list[Outcome] = []
        self._idle = 0.0  # requests per second at which requests are served one by one
        self._throughput = inf
        self._control: Control | None = None

    def run(self) -> Capacity:
        """Returns the capacity. Raises ConfigError: no rate or every rate meets the objectives; replications are too short or too few."""
        low, high, in_system = self._bracket()
        warmup = self._warmup(in_system)
        powers = np.arange(_RATES) - (_RATES - 1) / 2
        rates = sorted({self._round(sqrt(low * high) * _STEP**power) for power in powers})
        num = min(FIRST, self.most)
        self._add(rates, range(num), warmup)
        while True:
            capacity = self._estimate(warmup)
            ends = f"[{capacity.low:.4g}, {capacity.high:.4g}]"
            self.log(f"{num} replications: {capacity.rate:.4g} {ends} {self.goal.unit}, 95% interval so far")
            beyond = self._rates_beyond(capacity, rates)
            if not beyond and not capacity.high:
                raise ConfigError(f"slo: is not met even at {rates[0]:g} {self.goal.unit}; set looser objectives")
            near = self._near(capacity, rates)
            if added := beyond or self._rates_between(capacity, rates):
                rates = sorted([*rates, *added])
                self._add(added, range(min(FIRST, num)), warmup)
            elif self._add(near, range(num), warmup):
                continue  # rates that have become near lacked replications
            elif capacity.accuracy <= self.goal.accuracy and num >= min(LEAST, self.most):
                return capacity.widened(self.goal.accuracy)
            else:
                first, num = num, self._next_number(capacity, num)
                self._add(near, range(first, num), warmup)

    def _bracket(self) -> tuple[float, float, float]:
        """Returns rates that pass and fail, at most 10% apart, and the mean number of requests in the system at the passing rate.

        The first rate is the throughput of a full queue, as low rates take long to simulate.
        """
        if self.goal.per_session:
            return self._bracket_sessions()
        passes, in_system = self._pilot(_AT_ONCE)
        if passes:
            problem = f"requests={self.requests}: even if all arrive at once the objectives are met"
            raise ConfigError(f"{problem}; raise requests=, or set tighter objectives, in seconds")
        self._throughput = self.requests * _AT_ONCE / in_system / 2  # they wait for half of the queue on average
        rate = _round(self._throughput)
        passing, failing, at_passing = 0.0, inf, 0.0
        while failing > _NARROW * passing:
            passes, in_system = self._pilot(rate)
            if not passes and not passing and failing < inf:
                self._check_alone(rate, in_system)
            passing, failing, at_passing = (rate, failing, in_system) if passes else (passing, rate, at_passing)
            if not self.goal.grows:
                self._warmup(at_passing)  # grows with the rate: raises as soon as the requests are too few
            rate = _round(2 * rate if failing == inf else rate / 2 if not passing else sqrt(passing * failing))
        return passing, failing, at_passing

    def _bracket_sessions(self) -> tuple[float, float, float]:
        """Returns numbers of sessions that pass and fail, at most 10% or 1 apart, and the passing one once more."""
        most = int((MOST_REQUESTS if self.goal.grows else self.requests) / self.goal.per_session)
        passing, failing, sessions = 0, 0, min(self.goal.first, most)
        while not failing or failing - passing > max(1, (_NARROW - 1) * passing):
            passes, _ = self._pilot(sessions)
            passing, failing = (sessions, failing) if passes else (passing, sessions)
            if passing >= most:
                problem = f"even {most} sessions at a time meet the objectives, and more need more requests"
                more = f"give {self.goal.more}, or " * bool(self.goal.more)
                raise ConfigError(f"requests={self.requests}: {problem}; {more}set tighter objectives")
            sessions = (passing + failing) // 2 if failing else min(2 * sessions, most)
        if not passing:
            raise ConfigError("slo: no number of sessions meets it, not even one at a time; set looser objectives")
        return passing, failing, passing

    def _pilot(self, rate: float) -> tuple[bool, float]:
        """Returns whether a rate passes, and the mean number of requests in the system."""
        least = ceil(rate * self.goal.per_session) if self.goal.grows else 0
        requests = max(self.requests, least)
        warmup = ceil(_RESIDENCE_TIMES * rate) if self.goal.per_session else requests // 4
        passes, text, outcomes = self._try(rate, requests, warmup)
        if rate < _AT_ONCE:
            self.log(f"bracket: {rate:g} {self.goal.unit} {'passes' if passes else 'fails'} ({text})")
        if (in_system := float(np.mean([outcome.in_system for outcome in outcomes]))) == inf:
            when = f"at {rate:g} {self.goal.unit}" if rate < _AT_ONCE else "if all arrive at once"
            remedy = "let the policy admit some, or give a longer workload.timeout"
            raise ConfigError(f"requests={requests}: none is served {when}; {remedy}")
        return passes, in_system

    def _check_alone(self, rate: float, in_system: float) -> None:
        """Raises ConfigError if requests fail although they are served one by one.

        rate: one that fails. in_system: the mean number of requests in the system at this rate.
        """
        size = self.requests, self.requests // 4  # as in the bracket
        if not self._idle:
            self._idle, size = _round(_IDLE * rate / in_system), (min(_FEW, self.requests), 0)
            rate = self._idle
        if rate > self._idle:
            return
        passes, text, _ = self._try(rate, *size)
        if not passes:
            problem = f"slo: no rate meets it, as even requests served one at a time reach only {text}"
            raise ConfigError(f"{problem}; set looser objectives")

    def _try(self, rate: float, requests: int, warmup: int) -> tuple[bool, str, list[Outcome]]:
        pairs = [(number, rate) for number in range(min(_PILOT, self.most))]
        outcomes = self.simulate(pairs[:1], requests, warmup)
        if rate == _AT_ONCE or not self._hopeless(outcomes[0], len(pairs)):
            outcomes += self.simulate(pairs[1:], requests, warmup)
        self._pilots += outcomes
        share = sum(outcome.good for outcome in outcomes) / max(sum(outcome.total for outcome in outcomes), 1)
        return share >= self.goal.level, f"attainment {100 * share:.4g}%", outcomes

    def _hopeless(self, first: Outcome, num: int) -> bool:
        """Returns whether the first of `num` replications decides that a rate fails, even if all others have no violation."""
        return num * first.total - (first.total - first.good) < self.goal.level * num * first.total

    def _warmup(self, in_system: float) -> int:
        """Returns the requests that arrive in 5 mean residence times: 5 times the mean number in the system (Little's law)."""
        warmup = ceil(_RESIDENCE_TIMES * in_system)
        wanted = max(4 * warmup, ceil(self.goal.per_session * in_system))
        if self.goal.grows and self.goal.replications(wanted) >= min(LEAST, self.most):
            self.requests = max(self.requests, wanted)
            self.most = self.goal.replications(self.requests)
        if 4 * warmup > self.requests:
            few = f"give a trace of more than {self.goal.recorded} requests, or " if self.goal.recorded else ""
            problem = f"the first and last {warmup} do not count (5 mean residence times), which leaves too few"
            raise ConfigError(f"requests={self.requests}: {problem}; {few}give requests={6 * warmup} or more")
        return warmup

    def _add(self, rates: Sequence[float], numbers: Sequence[int], warmup: int) -> bool:
        """Simulates the replications that the rates lack. Returns whether there were any."""
        known = {(outcome.replication, outcome.rate) for outcome in self.outcomes}
        if pairs := [pair for pair in product(numbers, rates) if pair not in known]:
            latest = self.outcomes or self._pilots[-_PILOT:]
            seconds = sum(outcome.seconds for outcome in latest) / sum(outcome.requests for outcome in latest)
            where = f"{len(pairs)} replications at {', '.join(f'{rate:g}' for rate in rates)} {self.goal.unit}"
            took = f"about {seconds * self.requests * len(pairs):.0f} s of CPU to the next estimate"
            self.log(f"simulating {where}: {took}")
            self.outcomes += self.simulate(pairs, self.requests, warmup)
        return bool(pairs)

    def _estimate(self, warmup: int) -> Capacity:
        shares = _shares_of(self.outcomes, self.goal)
        if self.goal.queue is not None and len(shares.total) >= LEAST_SIMULATED:
            if self._control is None:
                self._control = Control(self.goal.queue, self.requests, warmup, self._throughput)
            shares = self._control.adjust(shares)
        return Capacity(shares.crossing(), *shares.interval(), shares, self.requests, warmup)

    def _rates_beyond(self, capacity: Capacity, rates: Sequence[float]) -> list[float]:
        """Returns further rates if an end of the interval lies beyond the rates, up to `_MOST_RATES`."""
        room, step = _MOST_RATES - len(rates), 1 if self.goal.per_session else 0
        below = [min(self._round(rates[0] / _STEP**power), rates[0] - step * power) for power in (1, 2)]
        above = [max(self._round(rates[-1] * _STEP**power), rates[-1] + step * power) for power in (1, 2)]
        added = [*(below if capacity.low == 0 else ()), *(above if capacity.high == inf else ())]
        return [rate for rate in added if rate > 0][: max(room, 0)]

    def _rates_between(self, capacity: Capacity, rates: Sequence[float]) -> list[float]:
        """Returns the ends of the wanted interval that no rate is near, as shares are interpolated; of a jump of the violations the middle."""
        accuracy, room, added = self.goal.accuracy, _MOST_RATES - len(rates), list[float]()
        for sign in (-1, 1) if capacity.rate else ():
            end = self._round(capacity.rate * (1 + sign * accuracy))
            is_near = any(0 <= sign * (rate / capacity.rate - 1) <= 1.5 * accuracy for rate in rates)
            added += [end] * (not is_near and end not in rates)
        if capacity.accuracy > accuracy and (jump := capacity.shares.jump()):
            added += {self._round(sqrt(jump[0] * jump[1]))} - {*rates, *added}
        return added[: max(room, 0)]

    def _round(self, rate: float) -> float:
        """Returns a rate with four significant digits, or a whole number of sessions."""
        return max(round(rate), 1) if self.goal.per_session else _round(rate)

    def _near(self, capacity: Capacity, rates: Sequence[float]) -> list[float]:
        """Returns the rates that enclose the interval, or the wanted interval if it is narrower."""
        wanted = (capacity.rate * (1 + sign * self.goal.accuracy) for sign in (-1, 1))
        low, high = max(capacity.low, next(wanted)), min(capacity.high, next(wanted))
        first = max([index for index, rate in enumerate(rates) if rate <= low], default=0)
        last = min([index for index, rate in enumerate(rates) if rate >= high], default=len(rates) - 1)
        return list(rates[first : last + 1])

    def _next_number(self, capacity: Capacity, num: int) -> int:
        """Returns the next number of replications, by the square of the interval's width; at most twice as many."""
        most, wanted = self.most, self.goal.accuracy
        needed = 2 * num if capacity.accuracy == inf else ceil(1.1 * num * (capacity.accuracy / wanted) ** 2)
        if num == most:
            half = f"±{100 * capacity.accuracy:.2g}%" if capacity.accuracy < inf else "no interval"
            missed = f"accuracy={wanted:g}: {num} replications of {capacity.requests} requests give {half}"
            if self.goal.recorded:
                remedy = f"the trace's {self.goal.recorded} requests hold no more; give a larger accuracy=, or draw from its lengths"
                remedy += " with workload=sharegpt workload.lengths.path=FILE workload.lengths.order=random"
            else:
                remedy = f"give replications={needed}, a larger requests=, or a larger accuracy="
            raise TooFewError(f"{missed}; {remedy}")
        return min(most, max(LEAST, num + 2, min(needed, 2 * num)))


def _shares_of(outcomes: Sequence[Outcome], goal: Goal) -> Shares:
    """Returns the counts as arrays."""
    rates, column = np.unique([outcome.rate for outcome in outcomes], return_inverse=True)
    row = [outcome.replication for outcome in outcomes]
    good, total = np.zeros((2, 1 + max(row), len(rates)))
    good[row, column], total[row, column] = zip(*((outcome.good, outcome.total) for outcome in outcomes), strict=True)
    return Shares(rates, good, total, goal.level, step=1.0 if goal.per_session else 0.0)


def _round(rate: float) -> float:
    """Rounds to four significant digits: readable, and the same when a search is resumed."""
    return float(f"{rate:.4g}")
