"""Programs, the sessions of policies that schedule by session; a request without a session is a program of its own."""

from collections.abc import Hashable

from cbatch import SERVED, Request


def program_of(request: Request) -> Hashable:
    """Returns the key of a request's program."""
    return request.id if request.session is None else request.session


def ends_program(request: Request) -> bool:
    """Returns whether no request of the program follows this one, since it is the last, or its client has left or it was rejected."""
    is_broken = request.finish_reason is not None and request.finish_reason not in SERVED
    return request.session is None or bool(request.last) or is_broken
