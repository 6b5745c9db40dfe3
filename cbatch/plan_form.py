"""Whether each field of a plan holds what `Plan` says: a quick look at every plan, and the fault in a malformed one."""

from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from numbers import Integral, Real
from typing import Any

from cbatch.plan import Plan
from cbatch.request import Request


def looks_well_formed(plan: Plan) -> bool:
    """Whether the fields are of the right kind; their entries are looked at only if they lead to an error."""
    try:
        columns = isinstance(plan.requests, list) and isinstance(plan.num_tokens, list)
        departing = isinstance(plan.preempt, list) and isinstance(plan.reject, list)
        others = type(plan.reserve) is dict and type(plan.note) is str and plan.wake_at is None
        padding = plan.pad_to is None or type(plan.pad_to) is int
        return columns and departing and others and padding and len(plan.requests) == len(plan.num_tokens)
    except AttributeError:  # one was deleted
        return False


def form_fault(plan: Plan) -> str | None:
    """Describes the first malformed field in a few words; None if all are well-formed."""
    return next(_faults(plan), None)


def _faults(plan: Plan) -> Iterator[str]:
    missing = [name for name in Plan.__slots__ if not hasattr(plan, name)]
    if missing:
        yield f"its field {missing[0]} was deleted"
        return
    for name in ("requests", "num_tokens", "preempt", "reject", "reserve"):
        value, kind = getattr(plan, name), dict if name == "reserve" else list
        if not isinstance(value, kind):
            yield f"{name} is {_shown(value)}, not a {kind.__name__}"
            return  # its entries cannot be checked
    if len(plan.requests) != len(plan.num_tokens):
        yield f"{len(plan.requests)} requests, but {len(plan.num_tokens)} token counts"
    columns: tuple[tuple[str, Iterable[Any], Callable[[Any], bool], str], ...] = (
        ("requests", plan.requests, _is_request, "a Request"),
        ("preempt", plan.preempt, _is_request, "a Request"),
        ("reserve", plan.reserve, _is_request, "a Request"),
        ("num_tokens", plan.num_tokens, _is_whole, "a whole number"),
        ("reject", plan.reject, _is_rejection, "a (Request, reason)"),
        ("reserve", plan.reserve.values(), _is_whole, "a whole number"),
    )
    for name, entries, fits, kind_name in columns:
        yield from (f"{name} holds {_shown(entry)}, not {kind_name}" for entry in entries if not fits(entry))
    if plan.pad_to is not None and not _is_whole(plan.pad_to):
        yield f"pad_to is {_shown(plan.pad_to)}, not a whole number or None"
    if plan.wake_at is not None and not (isinstance(plan.wake_at, Real) and isfinite(plan.wake_at)):
        yield f"wake_at is {_shown(plan.wake_at)}, not a time in seconds or None"
    if not isinstance(plan.note, str):
        yield f"note is {_shown(plan.note)}, not text"


def _is_request(value: Any) -> bool:
    return isinstance(value, Request)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_rejection(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and _is_request(entry[0]) and isinstance(entry[1], str)


def _shown(value: Any) -> str:
    """Returns a short one-line repr, or the class where repr raises."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"an object of {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}..."
