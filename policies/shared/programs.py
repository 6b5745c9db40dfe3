"""Programs, the sessions of policies that schedule by session; a request without a session is a program of its own."""

from collections import defaultdict
from collections.abc import Hashable

from cbatch import SERVED, Request
from policies.shared.latest import Latest


def program_of(request: Request) -> Hashable:
    """Returns the key of a request's program."""
    return request.id if request.session is None else request.session


def ends_program(request: Request) -> bool:
    """Returns whether no request of the program follows this one, since it is the last, or its client has left or it was rejected."""
    is_broken = request.finish_reason is not None and request.finish_reason not in SERVED
    return request.session is None or bool(request.last) or is_broken


def ended_at(request: Request) -> float:
    """Returns when an ended request ended here, in seconds; one that another replica continues, with its latest token."""
    return request.finished_at or request.last_token_at or request.arrival_time


class OpenPrograms:
    """Says when a program ends. Turns that run beside its last one may end, and even arrive, after it."""

    def __init__(self) -> None:
        self._open = defaultdict[Hashable, set[Request]](set)  # requests that have arrived and not ended
        self._over = Latest[Hashable, None]()  # sessions whose last request has ended

    def arrive(self, request: Request) -> None:
        self._open[program_of(request)].add(request)

    def finish(self, request: Request) -> bool:
        """Notes that a request has ended. Returns whether its program has: nothing of it is left, and none is expected."""
        program = program_of(request)
        self._open[program].discard(request)
        if request.session is not None and ends_program(request):
            self._over[program] = None
        if self._open[program]:
            return False
        del self._open[program]
        return request.session is None or program in self._over
