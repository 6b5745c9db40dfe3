"""What a moved request leaves behind: a row of the sender's table with its KV blocks, until the receiver has read them."""

from math import inf
from threading import Lock


class Lease:
    """A row of the sender. The receiver, perhaps on another thread, begins to read before `until`, or not at all.

    until: seconds. A read that has begun protects the blocks to its end.
    """

    def __init__(self, row: int, until: float = inf) -> None:
        self.row, self.until = row, until
        self._is_read = self._is_over = False
        self._lock = Lock()

    @property
    def next_at(self) -> float:
        """Returns when the lease may be over unless something else happens."""
        return inf if self._is_read else self.until

    def begin(self, now: float) -> bool:
        """Begins the read; returns False if the lease is over."""
        with self._lock:
            self._is_read = not (self._is_over or now >= self.until)
            return self._is_read

    def end(self) -> None:
        """Ends the lease: the read has ended, or there will be none."""
        with self._lock:
            self._is_over = True

    def revoke(self) -> bool:
        """Ends the lease unless the read has begun; returns whether it has ended."""
        with self._lock:
            self._is_over = self._is_over or not self._is_read
            return self._is_over

    def is_over(self, now: float) -> bool:
        with self._lock:
            self._is_over = self._is_over or (now >= self.until and not self._is_read)
            return self._is_over
