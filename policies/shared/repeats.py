"""What a policy misses while a plan of decodes is repeated without it (`Policy.steady`), for policies that count service."""

from collections.abc import Callable, Sequence
from typing import Any

from cbatch import BatchShape, Request, View


class Repeats:
    """Counts the repeats of the latest plan at the next one. Arrivals and ends come after the service of all repeats."""

    def __init__(self) -> None:
        self._events = list[tuple[Callable[[Request], object], Request]]()  # since the latest plan
        self._iteration, self._shape, self._requests = 0, BatchShape(), list[Request]()  # of the latest plan, if steady

    def defer(self, note: Callable[[Request], object], request: Request) -> None:
        """Calls `note` at the next plan."""
        self._events.append((note, request))

    def planned(self, view: View, shape: BatchShape, requests: Sequence[Request]) -> None:
        """Notes a plan. requests: those that it decodes if it may be repeated; else empty."""
        self._iteration, self._shape, self._requests = view.iteration, shape, [*requests]

    def catch_up(self, view: View, charge: Callable[..., Any]) -> None:
        """Calls `charge(request, seconds, samples=True)` for each repeat, then notes the events."""
        number, shape = len(self._requests), self._shape
        for repeat in range(1, view.iteration - self._iteration if number else 0):
            seconds = view.cost.predict(shape._replace(decode_context=shape.decode_context + repeat * number))
            for request in self._requests:
                charge(request, seconds, samples=True)
        for note, request in self._events:
            note(request)
        self._events.clear()
