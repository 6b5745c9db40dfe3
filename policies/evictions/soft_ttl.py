"""Soft time-to-live (RFC vllm#52113): blocks of a session that is about to continue are kept as long as other blocks can be evicted.

A wrong hint costs hits but cannot block a request, since nothing is pinned. Plans do not state until when blocks are kept: such a time
cannot distinguish blocks of a live session whose time is over from blocks without a session.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile

from cbatch import BlockHash, CachedBlock, ConfigError, Eviction, Request
from policies.pauses import TimeToLive
from policies.shared.latest import Latest
from policies.shared.programs import ends_program


class SoftTTL(Eviction):
    """Evicts blocks of no live session first, then blocks of sessions whose time is over, then the others.

    A session is live from its first release until its `last` request has ended, or one was not served. If its latest request does not say whether it is the
    last, the session ends when its time is over. The time restarts at each release, and is over at its end (now >= end).
    """

    depends_on = ("sessions",)

    dynamic = True

    def __init__(self, ttl: float | TimeToLive) -> None:
        """ttl: seconds, or an object that returns them for each request. Raises ConfigError below 0."""
        if not isinstance(ttl, TimeToLive) and ttl < 0:
            raise ConfigError(f"ttl={ttl} must be at least 0 seconds")
        self.ttl = ttl
        self.until: dict[str, float] = {}  # by session
        self._ends_unknown: dict[str, None] = {}  # sessions, in the order of the ends of their times
        self._ended = Latest[str, None]()  # sessions of which no request follows; earlier ones may still run
        self._hashes: defaultdict[str, set[BlockHash]] = defaultdict(set)
        self._sessions: defaultdict[BlockHash, set[str]] = defaultdict(set)

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[int]:
        for session in [*takewhile(lambda session: self.until[session] <= now, self._ends_unknown)]:
            self.end(session)
        return [self._class_of(block.hash, now) for block in blocks]

    def _class_of(self, block_hash: BlockHash, now: float) -> int:
        sessions = self._sessions.get(block_hash)
        if not sessions:
            return 0
        return 2 if any(now < self.until[session] for session in sessions) else 1

    def on_admit(self, request: Request, hashes: Sequence[BlockHash], now: float) -> None:
        if isinstance(self.ttl, TimeToLive):
            self.ttl.pauses.note_arrival(request)

    def on_release(self, request: Request, hashes: Sequence[BlockHash], now: float) -> None:
        if (session := request.session) is None or session in self._ended:
            return
        self._ends_unknown.pop(session, None)
        if request.last is None:
            self._ends_unknown[session] = None
        self.until[session] = now + self._seconds(request, now)
        self._hashes[session].update(hashes)
        for block_hash in hashes:
            self._sessions[block_hash].add(session)

    def _seconds(self, request: Request, now: float) -> float:
        if not isinstance(self.ttl, TimeToLive):
            return self.ttl
        self.ttl.pauses.note_end(request, now)
        return self.ttl.after(request)

    def on_finish(self, request: Request) -> None:
        if request.session is not None and ends_program(request):
            self._ended[request.session] = None
            self.end(request.session)

    def end(self, session: str) -> None:
        """Releases a session: nothing refers to its blocks any more."""
        self.until.pop(session, None)
        self._ends_unknown.pop(session, None)
        for block_hash in self._hashes.pop(session, ()):
            self._sessions[block_hash].discard(session)
            if not self._sessions[block_hash]:
                del self._sessions[block_hash]
