"""The changes of a prefix cache, for readers that follow its content."""

from collections.abc import Iterable, Sequence

from cbatch.kv.eviction import Name


class Changes:
    """A log of names that entered or left a prefix cache. Each reader keeps a cursor into the log.

    Nothing is logged before the first reader begins. The log keeps between `most` and twice as many changes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: list[Name] | None = None
        self._first = 0  # the cursor of the oldest change kept

    def begin(self) -> int:
        """Returns the cursor of a new reader."""
        if self._names is None:
            self._names = []
        return self._first + len(self._names)

    def add(self, names: Iterable[Name]) -> None:
        if self._names is None:
            return
        self._names += names
        if len(self._names) > 2 * self._most:
            self._first += len(self._names) - self._most
            del self._names[: -self._most]

    def since(self, cursor: int) -> Sequence[Name] | None:
        """Returns the changes since a reader's cursor; None if some of them are no longer kept."""
        assert self._names is not None, "readers begin with `begin`"
        return self._names[cursor - self._first :] if cursor >= self._first else None
