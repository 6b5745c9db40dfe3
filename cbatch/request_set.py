"""The ordered sets of requests that the engine changes and a policy sees."""

from collections.abc import Iterable, Iterator

import numpy as np

from cbatch.request import Request
from cbatch.request_table import Ints


class RequestSet:
    """An ordered set of requests; their list and table rows are rebuilt only after a change.

    To a policy it is a read-only `Collection[Request]`; `State` alone adds and removes.
    """

    __slots__ = ("_list", "_members", "_rows")

    def __init__(self) -> None:
        self._members: dict[Request, int] = {}  # their table rows
        self._rows: Ints | None = None
        self._list: list[Request] | None = None

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._members)

    def __contains__(self, request: object) -> bool:
        return request in self._members

    @property
    def members(self) -> list[Request]:
        """In order; not to be changed."""
        if self._list is None:
            self._list = list(self._members)
        return self._list

    @property
    def rows(self) -> Ints:
        if self._rows is None:
            self._rows = np.fromiter(self._members.values(), np.int64, len(self._members))
        return self._rows

    def among(self, requests: Iterable[Request]) -> list[Request]:
        """Returns the `requests` that are members, in the order given."""
        return list(filter(self._members.__contains__, requests))

    def without(self, requests: set[Request]) -> set[Request]:
        """Returns the `requests` that are not members."""
        return requests.difference(self._members)

    def add(self, request: Request) -> None:
        self._members[request] = request.row
        self._rows = self._list = None

    def discard(self, request: Request) -> None:
        if self._members.pop(request, None) is not None:
            self._rows = self._list = None
