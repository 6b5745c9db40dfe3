"""Soft time-to-live (RFC vllm#52113): blocks of a session that is about to continue are kept as long as other blocks can be evicted.

A wrong hint costs hits but cannot block a request, since nothing is pinned. Plans do not state until when blocks are kept: such a time
cannot distinguish blocks of a live session whose time is over from blocks without a session.
"""

from collections import defaultdict
from collections.abc import Sequence

from cbatch import CachedBlock, ConfigError, Eviction, Name, Request


class SoftTTL(Eviction):
    """Evicts blocks without a live session first, then blocks of sessions whose time is over, then other blocks.

    A session is live from its first release until all its submitted requests have ended. A session's time restarts at each release,
    and is over once now >= end.
    """

    depends_on = ("sessions",)

    dynamic = True

    def __init__(self, ttl: float) -> None:
        """ttl: seconds. Raises ConfigError if ttl is below 0."""
        if ttl < 0:
            raise ConfigError(f"ttl={ttl} must be at least 0 seconds")
        self.ttl = ttl
        self.until: dict[str, float] = {}  # by session
        self._outstanding: defaultdict[str, int] = defaultdict(int)  # unfinished requests
        self._names: defaultdict[str, set[Name]] = defaultdict(set)
        self._sessions: defaultdict[Name, set[str]] = defaultdict(set)

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[int]:
        return [self._class_of(block.name, now) for block in blocks]

    def _class_of(self, name: Name, now: float) -> int:
        sessions = self._sessions.get(name)
        if not sessions:
            return 0
        return 2 if any(now < self.until[session] for session in sessions) else 1

    def on_submit(self, request: Request, names: Sequence[Name]) -> None:
        if request.session is not None:
            self._outstanding[request.session] += 1

    def on_release(self, request: Request, names: Sequence[Name], now: float) -> None:
        if (session := request.session) is not None:
            self.until[session] = now + self.ttl
            self._names[session].update(names)
            for name in names:
                self._sessions[name].add(session)

    def on_finish(self, request: Request) -> None:
        if (session := request.session) is None:
            return
        self._outstanding[session] -= 1
        if not self._outstanding[session]:
            self.end(session)

    def end(self, session: str) -> None:
        """Removes a session and its references to blocks."""
        self.until.pop(session, None)
        for name in self._names.pop(session, ()):
            self._sessions[name].discard(session)
            if not self._sessions[name]:
                del self._sessions[name]
