"""Links between replicas: how long transfers take that share one, at equal rates or one after the other.

Times are seconds. A transfer alone takes a latency, then its `work`: what its bytes take at the link's full rate.
"""

from bisect import bisect_right, insort
from heapq import heappop, heappush
from itertools import takewhile
from math import inf
from operator import itemgetter

_NOTHING = 1e-12  # seconds of work that is left by rounding


class Link:
    """One direction between two replicas.

    fair: transfers share the rate equally once their latency has passed; otherwise one follows the other, latency included.
    """

    def __init__(self, fair: bool = True) -> None:
        self._fair = fair
        # a heap: when a transfer's latency has passed, its key, its work
        self._begins: list[tuple[float, int, float]] = []
        self._left: dict[int, float] = {}  # work of the transfers that share the link
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
        end = self._at + min(self._left.values()) * len(self._left) if self._left else inf
        return min(end, self._begins[0][0] if self._begins else inf)

    def advance(self, now: float) -> list[int]:
        """Advances to `now`; returns the keys of the transfers that have ended, by time and key."""
        ended = list[int]()
        while (at := self.next_at) <= now:
            self._run(at)
            while self._begins and self._begins[0][0] <= at:
                _, key, work = heappop(self._begins)
                self._left[key] = work
            over = sorted(key for key, work in self._left.items() if work <= _NOTHING)
            for key in over:
                del self._left[key]
            ended += over
        self._run(now)
        return ended

    def _run(self, until: float) -> None:
        if self._left and until > self._at:
            share = (until - self._at) / len(self._left)
            least = min(self._left.values())
            share = least if abs(share - least) <= _NOTHING else share
            self._left = {key: work - share for key, work in self._left.items()}
            since = self._busy.pop()[0] if self._busy and self._busy[-1][1] == self._at else self._at
            self._busy.append((since, until))
        self._at = max(self._at, until)

    def ends_at(self, key: int) -> float:
        """Returns when a transfer that has begun ends, unless others begin before."""
        link = Link()
        link._begins, link._left, link._at = [*self._begins], {**self._left}, self._at
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
