"""Links between replicas: how long transfers take that share one, at equal rates or one after the other.

Times are seconds. A transfer alone takes a latency, then its `work`: what its bytes take at the link's full rate.
"""

from bisect import bisect_right, insort
from heapq import heappop, heappush
from itertools import takewhile
from math import inf
from operator import itemgetter


class Link:
    """One direction between two replicas.

    fair: transfers share the rate equally once their latency has passed; otherwise one follows the other, latency included.
    """

    def __init__(self, fair: bool) -> None:
        self._fair = fair
        # heaps: when a transfer's latency has passed, its key, its work; and what `_served` is at the end of one that shares the link, its key
        self._begins: list[tuple[float, int, float]] = []
        self._ends: list[tuple[float, int]] = []
        self._served = 0.0  # work of a transfer that has shared the link from the first on
        self._at = self._free_at = 0.0
        self._busy: list[tuple[float, float]] = []  # spans, in order

    def add(self, key: int, now: float, latency: float, work: float) -> None:
        """Begins a transfer. Call `advance` up to `now` first."""
        if not self._fair:
            now = max(now, self._free_at)
            self._free_at = now + latency + work
        heappush(self._begins, (now + latency, key, work))

    @property
    def next_at(self) -> float:
        """Returns when the next transfer ends, or begins to share the link."""
        end = self._at + (self._ends[0][0] - self._served) * len(self._ends) if self._ends else inf
        return min(end, self._begins[0][0] if self._begins else inf)

    def advance(self, now: float) -> list[int]:
        """Advances to `now`; returns the keys of the transfers that have ended, by time and key."""
        ended = list[int]()
        while (at := self.next_at) <= now:
            self._run(at)
            if self._begins and self._begins[0][0] <= at:
                _, key, work = heappop(self._begins)
                heappush(self._ends, (self._served + work, key))
            else:
                self._served, key = heappop(self._ends)  # not as the clock has it, which is rounded
                ended.append(key)
        self._run(now)
        return ended

    def _run(self, until: float) -> None:
        if self._ends and until > self._at:
            self._served += (until - self._at) / len(self._ends)
            since = self._busy.pop()[0] if self._busy and self._busy[-1][1] == self._at else self._at
            self._busy.append((since, until))
        self._at = max(self._at, until)

    def ends_at(self, key: int) -> float:
        """Returns when a transfer that has begun ends, unless others begin before."""
        link = Link(self._fair)
        link._begins, link._ends, link._served, link._at = [*self._begins], [*self._ends], self._served, self._at
        while key not in link.advance(at := link.next_at):
            pass
        return at

    def hide(self, begin: float, end: float, work: float) -> float:
        """Returns how much of a transfer's work the link has had time for in a past window, and takes that time."""
        hidden, first = 0.0, bisect_right(self._busy, begin, key=itemgetter(1))
        spans = [*takewhile(lambda span: span[0] < end, self._busy[first:]), (end, end)]
        for since, until in spans:
            if (taken := min(since - begin, work - hidden)) > 0:
                insort(self._busy, (begin, begin + taken))
                hidden += taken
            begin = until
        return hidden
