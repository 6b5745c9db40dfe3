"""The changes of a prefix cache, for readers that follow its content."""

from collections.abc import Iterable, Sequence

from cbatch.kv.eviction import BlockHash


class Changes:
    """A log of hashes that entered or left a prefix cache. Each reader keeps a cursor into the log.

    Nothing is logged before the first reader begins. The log keeps between `most` and twice as many changes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._hashes: list[BlockHash] | None = None
        self._first = 0  # the cursor of the oldest change kept

    def begin(self) -> int:
        """Returns the cursor of a new reader."""
        if self._hashes is None:
            self._hashes = []
        return self._first + len(self._hashes)

    def add(self, hashes: Iterable[BlockHash]) -> None:
        if self._hashes is None:
            return
        self._hashes += hashes
        if len(self._hashes) > 2 * self._most:
            self._first += len(self._hashes) - self._most
            del self._hashes[: -self._most]

    def since(self, cursor: int) -> Sequence[BlockHash] | None:
        """Returns the changes since a reader's cursor; None if some of them are no longer kept."""
        assert self._hashes is not None, "readers begin with `begin`"
        return self._hashes[cursor - self._first :] if cursor >= self._first else None
