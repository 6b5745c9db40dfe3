"""Bounded memory of sessions, as a server sees new ones without end."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST = 100_000


class Latest(dict[K, V]):
    """Keeps the `MOST` entries set last, oldest first."""

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > MOST:
            del self[next(iter(self))]
