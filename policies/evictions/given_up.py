"""Evicts what the policy has given up (`Plan.give_up`), as InferCept does in pauses: the policy decides, not the order of releases."""

from collections.abc import Sequence
from math import inf

from cbatch import BlockHash, CachedBlock, Request
from policies.evictions.soft_ttl import SoftTTL


class GivenUp(SoftTTL):
    """Blocks of no live session go first, then those that only given-up sessions have, then the others. Host memory keeps swapped and live sessions."""

    def __init__(self) -> None:
        super().__init__(inf)
        self._swapped = set[str]()

    def keeps(self, block: CachedBlock, now: float) -> bool:
        sessions = self._sessions.get(block.hash, ())
        return any(session in self._swapped or now < self.until[session] for session in sessions)

    def on_give_up(self, session: str, to_host: bool) -> None:
        if session in self.until:
            self.until[session] = -inf
            (self._swapped.add if to_host else self._swapped.discard)(session)

    def on_release(self, request: Request, hashes: Sequence[BlockHash], now: float) -> None:
        self._swapped.discard(request.session or "")
        super().on_release(request, hashes, now)
