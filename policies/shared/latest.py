"""What is remembered of sessions: of the latest ones only, as a server sees new ones without end."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST = 100_000


class Latest(dict[K, V]):
    """The entries that were set last, the oldest first; at most `MOST`."""

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > MOST:
            del self[next(iter(self))]
