"""Waiting requests by a key that falls with time at a rate per request, such as relative slack."""

from math import inf

import numpy as np

from cbatch import Request


class FallingQueue:
    """Requests by ascending key = start - rate * now. Ties: the request pushed first."""

    def __init__(self) -> None:
        self._requests: list[Request | None] = []  # by place; None: has left
        self._place: dict[Request, int] = {}
        self._lines = np.zeros((2, 64))  # start and rate by place
        self._near, self._many = -inf, 0  # keys only fall, so recent least keys still lie below `near`

    def push(self, request: Request, start: float, rate: float) -> None:
        """Adds a request. start: key at now = 0. rate: nonnegative loss of the key per second."""
        self.discard(request)
        if len(self._requests) == self._lines.shape[1]:
            self._make_room()
        self._place[request] = place = len(self._requests)
        self._lines[:, place] = start, rate
        self._requests.append(request)

    def discard(self, request: Request) -> None:
        if (place := self._place.pop(request, None)) is not None:
            self._lines[0, place], self._requests[place] = inf, None

    def least(self, now: float, count: int) -> list[tuple[float, Request]]:
        """Returns (key, request) for the `count` least keys, in no particular order."""
        start, rate = self._lines[:, : len(self._requests)]
        keys = start - now * rate
        places = np.flatnonzero(keys <= self._near)
        if not min(count, len(self._place)) <= len(places) <= self._many:
            self._near = np.partition(keys, 4 * count)[4 * count] if len(keys) > 4 * count else inf
            places = np.flatnonzero(keys <= self._near)
            self._many = 2 * len(places) + 32 * count
        if len(places) > count:
            among = keys[places]
            last = np.partition(among, count - 1)[count - 1]
            below = places[among < last]
            places = np.concatenate([below, places[among == last][: count - len(below)]])
        pairs = ((keys[place], self._requests[place]) for place in places.tolist())
        return [(key, request) for key, request in pairs if request is not None]

    def _make_room(self) -> None:
        """Removes the places of requests that have left, and leaves as many free places as there are taken places."""
        kept = [*self._place.values()]
        lines = np.zeros((2, 2 * len(kept) + 64))
        lines[:, : len(kept)] = self._lines[:, kept]
        self._lines, self._requests = lines, [*self._place]
        self._place = {request: place for place, request in enumerate(self._place)}
