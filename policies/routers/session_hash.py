"""Session affinity of production-stack: the session's replica on a circle of hashes; without a session the least requested replica.

Source: vllm-project/production-stack, `routing_logic.py` (SessionRouter). Least requested: the fewest requests sent there within
the last 60 s; ties: the lowest index. A session's replica that cannot serve the request is passed over.
"""

from collections import deque

from cbatch import Request
from cbatch.cluster import ClusterView
from policies.shared.hash_ring import position_of, ring_of

WINDOW = 60.0
"""Seconds over which requests are counted."""


class SessionHash:
    depends_on = ("sessions",)

    def __init__(self) -> None:
        self._sent: deque[tuple[float, int]] = deque()  # times and lives of replicas within the window

    def choose(self, request: Request, view: ClusterView) -> int:
        while self._sent and self._sent[0][0] <= view.now - WINDOW:
            self._sent.popleft()
        chosen = self._choose(request, view)
        self._sent.append((view.now, view[chosen].life))
        return chosen

    def _choose(self, request: Request, view: ClusterView) -> int:
        able = view.fitting(request)
        if request.session is not None:
            around = ring_of(len(view)).clockwise(position_of(request.session))
            return next(index for index in around if index in able)
        lives = [life for _, life in self._sent]
        return min(able, key=lambda index: lives.count(view[index].life))
