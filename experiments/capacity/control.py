"""A control variate: the same requests in a queue of one server, where a replication takes microseconds.

Whether a replication is unlucky lies mostly in its arrivals and lengths, and a queue shows it: its late requests explain
70 to 97% of the variance of what a policy with chunks violates. As the queue's own mean is known from many more
replications, what it explains can be taken away (regression control; Lavenberg and Welch, "A perspective on the use of
control variables", Management Science 27, 1981). As the slope is estimated from the same replications, the estimate of the
mean has a bias of the order of 1 / replications.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from experiments.capacity.estimate import Floats, Shares
from experiments.trials.replications import natural_rate
from experiments.workloads import OpenLoop, Workload

Draw = Callable[[int, int], tuple[Floats, Floats]]
"""Arrivals at one request per second and work in any unit, [requests] each, of a replication and a number of requests."""

_DRAWN = 2_000_000  # requests of the queue, in all replications
_LEAST = 8  # simulated replications from which a regression is worth its degree of freedom
_DRAIN = 1.05  # a full queue's throughput is so much higher without its last iterations, which are not full


class Control:
    """The queue. throughput: requests per second of a full one. warmup: requests that do not count, first and last.

    drawn: replications of the queue, the simulated ones first.
    """

    def __init__(self, draw: Draw, requests: int, warmup: int, throughput: float, drawn: int = 0) -> None:
        self._drawn = drawn or _DRAWN // requests
        arrivals, work = zip(*(draw(number, requests) for number in range(self._drawn)), strict=True)
        self._arrivals = np.array(arrivals)
        service = np.array(work) / np.mean(work) / (_DRAIN * throughput)
        self._before = np.cumsum(service, axis=1) - service  # seconds of those that came earlier
        self._counted = slice(warmup, requests - warmup)

    def adjust(self, shares: Shares) -> Shares:
        """The shares without what the queue explains of their scatter, at the rates where enough replications have violations."""
        good, scarce = shares.good.copy(), shares.scarce
        for index, rate in enumerate(shares.rates):
            [made] = shares.asked[:, index].nonzero()  # a rate that was added late, or far off for a while, lacks some
            if len(made) >= _LEAST and not scarce[index] and made[-1] < self._drawn / 4:
                good[made, index] = self._adjust(rate, made, good[made, index], shares.asked[made, index])
        return replace(shares, good=good)

    def _adjust(self, rate: float, made: NDArray[np.intp], good: Floats, asked: Floats) -> Floats:
        num, bad = len(good), asked - good
        wait = self._before - self._arrivals / rate
        wait = (wait - np.minimum.accumulate(wait, axis=1))[:, self._counted]  # Lindley 1952
        limit = np.quantile(wait[made], 1 - bad.sum() / asked.sum())
        late = (wait > limit).mean(axis=1)
        simulated = late[made]
        from_mean, scatter, luck = simulated - simulated.mean(), bad - bad.mean(), simulated.mean() - late.mean()
        if not (squares := from_mean @ from_mean):
            return good
        slope = from_mean @ scatter / squares
        left = (scatter - slope * from_mean) / (1 - from_mean**2 / squares)  # by the line through the others
        known = slope**2 * late.var() * num / self._drawn  # how well the queue's mean is
        variance = left.var() * (1 + num * luck**2 / squares) * num / (num - 2) + known  # slope and limit are estimated
        if variance > scatter.var() / 2:
            return good
        widened = (left - left.mean()) * np.sqrt(variance / left.var()) if left.any() else left
        adjusted: Floats = asked - (bad.mean() - slope * luck) - widened
        return adjusted


def draw_queue(workload: Workload) -> Draw | None:
    """Returns what draws the replications of a workload for `Control`; None where only whole requests can be drawn."""
    if not isinstance(workload, OpenLoop):
        return None

    def draw(number: int, requests: int) -> tuple[Floats, Floats]:
        trace = replace(workload, seed=workload.seed + number, num_requests=requests).trace()
        assert trace.arrival_time is not None, "of an open loop"
        work = (trace.prompt_tokens + trace.output_tokens).astype(float)
        return (trace.arrival_time - trace.arrival_time[0]) * natural_rate(workload, requests), work

    return draw
