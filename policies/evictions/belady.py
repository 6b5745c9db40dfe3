"""Belady's optimum: evicts the block whose next use is farthest (Belady, IBM Systems Journal, 1966).

It reads the future, so it is a yardstick and not a policy. If requests are admitted one at a time in the order of submission, it bounds
the hits of all evictions; otherwise it is a reference.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from math import inf

from cbatch import CachedBlock, Eviction, Name, Request


class Belady(Eviction):
    """Reads the prompts of all submitted requests. A spare copy of a block is never used again.

    An admitted request takes the blocks that it uses out of the cache, and the blocks are ranked again at their release. Keys therefore
    change only when requests are submitted, or end without having been admitted.
    """

    def __init__(self) -> None:
        self._uses: defaultdict[Name, deque[int]] = defaultdict(deque)  # places of requests, ascending
        self._places: dict[int, int] = {}  # of requests not yet admitted, by id
        self._admitted: set[int] = set()  # places

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[tuple[float, int]]:
        self.dynamic = False
        return [(-inf if block.is_spare else -self._next_use(block.name), -block.end) for block in blocks]

    def _next_use(self, name: Name) -> float:
        uses = self._uses.get(name, deque())
        while uses and uses[0] in self._admitted:
            uses.popleft()
        return uses[0] if uses else inf

    def on_submit(self, request: Request, names: Sequence[Name]) -> None:
        self.dynamic = True
        self._places[request.id] = place = len(self._places) + len(self._admitted)
        for name in names:
            self._uses[name].append(place)

    def on_admit(self, request: Request, names: Sequence[Name], now: float) -> None:
        if (place := self._places.pop(request.id, None)) is not None:
            self._admitted.add(place)

    def on_finish(self, request: Request) -> None:
        if request.id in self._places:  # a request that was never admitted uses no blocks
            self.dynamic = True
            self.on_admit(request, (), 0.0)
