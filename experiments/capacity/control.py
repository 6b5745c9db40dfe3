"""A control variate: the same requests in a queue of one server, where a replication takes microseconds.

Whether a replication is unlucky depends mostly on arrivals and lengths. The queue's late requests explain 70 to 97% of the variance of
the violations of a policy with chunks. The queue's mean is known from many more replications, so the explained part can be
subtracted (regression control; Lavenberg and Welch, "A perspective on the use of control variables", Management Science 27, 1981).
The slope is estimated from the same replications, which gives the mean a bias of the order of 1 / replications.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cbatch.results.metrics import Floats
from experiments.capacity.estimate import Shares
from experiments.trials.replications import natural_rate
from experiments.workloads import OpenLoop, Workload

Draw = Callable[[int, int], tuple[Floats, Floats]]
"""Called with a replication and a number of requests; returns arrivals at one request per second, and work in any unit, [requests] each."""

_DRAWN = 2_000_000  # requests of the queue, in all replications
LEAST_SIMULATED = 8  # simulated replications from which on a regression is worth its degree of freedom
_AT_ONCE = 50  # replications of the queue: few enough for the processor's cache
_DRAIN = 1.05  # a full queue's throughput without its last iterations, which are not full, over that with them


class Control:
    """Simulates the queue, and removes from shares the scatter that it explains.

    throughput: requests per second of a full queue. warmup: requests at the beginning that do not count, and as many at the end.
    num_drawn: replications of the queue; the first ones are those that are simulated.
    """

    def __init__(self, draw: Draw, requests: int, warmup: int, throughput: float, num_drawn: int = 0) -> None:
        self._num_drawn = num_drawn or _DRAWN // requests
        arrivals, work = zip(*(draw(number, requests) for number in range(self._num_drawn)), strict=True)
        self._arrivals = np.array(arrivals)
        service = np.array(work) / np.mean(work) / (_DRAIN * throughput)
        self._before = np.cumsum(service, axis=1) - service  # seconds of work of earlier requests
        self._counted = slice(warmup, requests - warmup)

    def adjust(self, shares: Shares) -> Shares:
        """Returns the shares without the scatter that the queue explains, at the rates where enough replications have violations."""
        good, scarce = shares.good.copy(), shares.scarce
        for index, rate in enumerate(shares.rates):  # one that was added late, or far from the crossing, lacks some
            [made] = shares.total[:, index].nonzero()
            if len(made) >= LEAST_SIMULATED and not scarce[index] and made[-1] < self._num_drawn / 4:
                good[made, index] = self._adjust(rate, made, good[made, index], shares.total[made, index])
        return replace(shares, good=good)

    def _waits(self, rate: float, which: NDArray[np.intp] | slice) -> Floats:
        """Returns the seconds that requests of some replications wait, [replications, counted requests] (Lindley 1952)."""
        wait = self._before[which] - self._arrivals[which] / rate
        wait -= np.minimum.accumulate(wait, axis=1)
        counted: Floats = wait[:, self._counted]
        return counted

    def _adjust(self, rate: float, made: NDArray[np.intp], good: Floats, total: Floats) -> Floats:
        num, bad = len(good), total - good
        limit = np.quantile(self._waits(rate, made), 1 - bad.sum() / total.sum())
        parts = (slice(first, first + _AT_ONCE) for first in range(0, self._num_drawn, _AT_ONCE))
        late = np.concatenate([(self._waits(rate, part) > limit).mean(axis=1) for part in parts])
        simulated = late[made]
        from_mean, scatter, luck = simulated - simulated.mean(), bad - bad.mean(), simulated.mean() - late.mean()
        if not (squares := from_mean @ from_mean):
            return good
        slope = from_mean @ scatter / squares
        # leave-one-out residuals
        left = (scatter - slope * from_mean) / (1 - from_mean**2 / squares)
        known = slope**2 * late.var() * num / self._num_drawn  # the error of the queue's mean
        variance = left.var() * (1 + num * luck**2 / squares) * num / (num - 2) + known  # slope and limit are estimated
        if variance > scatter.var() / 2:
            return good
        widened = (left - left.mean()) * np.sqrt(variance / left.var()) if left.any() else left
        adjusted: Floats = total - (bad.mean() - slope * luck) - widened
        return adjusted


def draw_queue(workload: Workload) -> Draw | None:
    """Returns the function that draws replications of a workload for `Control`; None if only whole requests can be drawn."""
    if not isinstance(workload, OpenLoop):
        return None

    def draw(number: int, requests: int) -> tuple[Floats, Floats]:
        trace = replace(workload, seed=workload.seed + number, num_requests=requests).trace()
        assert trace.arrival_time is not None, "of an open loop"
        work = (trace.prompt_tokens + trace.output_tokens).astype(float)
        return (trace.arrival_time - trace.arrival_time[0]) * natural_rate(workload, requests), work

    return draw
