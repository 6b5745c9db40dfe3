"""The queues of multi-level feedback: whoever uses up the quantum of one moves to the tail of the next, with twice the quantum."""

from itertools import count

from cbatch import Request


class Quanta:
    """Each request's queue, its place there, and the seconds that it has used of the quantum."""

    def __init__(self, quantum: float) -> None:
        """quantum: seconds of queue 0."""
        self.quantum = quantum
        self._place: dict[Request, tuple[int, int]] = {}  # number of the queue, and of the joining
        self._used: dict[Request, float] = {}
        self._num_joined = 0

    def place(self, request: Request) -> tuple[int, int]:
        """Ascending: from the head of the first queue to the tail of the last."""
        return self._place[request]

    def first_queue(self, seconds: float) -> int:
        """The first queue whose quantum holds so many seconds."""
        return next(number for number in count() if self.quantum * 2**number >= seconds)

    def join(self, request: Request, number: int) -> None:
        """Enters a queue at its tail."""
        self._num_joined += 1
        self._place[request], self._used[request] = (number, self._num_joined), 0.0

    def charge(self, request: Request, seconds: float) -> None:
        self._used[request] += seconds
        if self._used[request] > self.quantum * 2 ** (number := self._place[request][0]):
            self.join(request, number + 1)

    def leave(self, request: Request) -> None:
        del self._place[request], self._used[request]
