"""One machine that does one job at a time and may interrupt it: the relaxation that all bounds rest on.

[arrays] are float64, one value per job, seconds.
"""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def srpt(release: Floats, work: Floats) -> Floats:
    """The ends of all jobs under shortest remaining processing time, ascending.

    For every k, no schedule ends its k-th job earlier (Schrage, Operations Research 16, 1968).
    """
    order = np.argsort(release, kind="stable")
    ends: list[float] = []
    remaining: list[float] = []  # a heap
    now = 0.0
    for arrival, seconds in zip(release[order].tolist(), work[order].tolist(), strict=True):
        now = _run(remaining, ends, now, arrival)
        heappush(remaining, seconds)
    _run(remaining, ends, now, float("inf"))
    return np.array(ends)


def _run(remaining: list[float], ends: list[float], now: float, until: float) -> float:
    """Does the shortest jobs up to a time; returns that time."""
    while remaining:
        if now + remaining[0] > until:
            heappush(remaining, heappop(remaining) - (until - now))
            return until
        now += heappop(remaining)
        ends.append(now)
    return until


def makespan(release: Floats, work: Floats) -> float:
    """The end of the last job of any schedule that is never idle while there is work."""
    order = np.argsort(release)
    after = np.cumsum(work[order][::-1])[::-1]
    return float((release[order] + after).max(initial=0.0))
