"""The relaxation behind all bounds: a machine that runs one job at a time and may preempt it. Arrays are seconds, [jobs]."""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def srpt(release: Floats, work: Floats) -> Floats:
    """Returns the ends of all jobs under shortest remaining processing time, ascending.

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
    """Runs the shortest jobs until the time `until`, and returns `until`."""
    while remaining:
        if now + remaining[0] > until:
            heappush(remaining, heappop(remaining) - (until - now))
            return until
        now += heappop(remaining)
        ends.append(now)
    return until


def makespan(release: Floats, work: Floats) -> float:
    """Returns the end of the last job under any schedule that is never idle while there is work."""
    order = np.argsort(release)
    after = np.cumsum(work[order][::-1])[::-1]
    return float((release[order] + after).max(initial=0.0))


def fewest_late(release: Floats, due: Floats, work: Floats) -> int:
    """Returns the fewest jobs that any schedule ends late, provided that jobs released later are due no earlier.

    Jobs join a set in the order of their releases. Whenever the last job would be late, the set drops the job whose removal
    makes the set end earliest (Kise, Ibaraki and Mine, Operations Research 26, 1978).
    """
    order = np.lexsort((due, release))
    release, due, work = release[order], due[order], work[order]
    due *= 1 + 1e-12  # more than the rounding of sums in another order
    done = np.cumsum(work)
    if (done + np.maximum.accumulate(release - done + work) <= due).all():
        return 0
    kept = _Kept(len(work))
    return sum(kept.join(*job) for job in zip(release.tolist(), due.tolist(), work.tolist(), strict=True))


class _Kept:
    """The jobs that are on time since the machine was last idle. `_chain`: a job's release plus all work from this job on."""

    def __init__(self, most: int) -> None:
        self._work, self._chain = np.zeros(most), np.zeros(most)
        self._number, self._end = 0, -np.inf

    def join(self, release: float, due: float, work: float) -> bool:
        """Adds a job. Returns whether a job was dropped."""
        if release >= self._end:
            self._number = 0
        number = self._number
        self._chain[:number] += work
        self._chain[number], self._work[number] = release + work, work
        self._number, self._end = number + 1, max(self._end, release) + work
        if self._end <= due:
            return False
        works, chain = self._work[: number + 1], self._chain[: number + 1]
        ahead = np.maximum.accumulate(np.concatenate(([-np.inf], chain[:-1])))
        behind = np.maximum.accumulate(np.concatenate(([-np.inf], chain[:0:-1])))[::-1]
        ends = np.maximum(ahead - works, behind)
        place = int(ends.argmin())
        self._end = float(ends[place])
        chain[:place] -= works[place]
        chain[place:-1], works[place:-1] = chain[place + 1 :].copy(), works[place + 1 :].copy()
        self._number = number
        return True
