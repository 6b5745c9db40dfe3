"""Explains a malformed plan: which field does not hold what `Plan` says. Runs only after a check failed."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from numbers import Integral, Real
from typing import Any

from cbatch.plan import Plan
from cbatch.request import Request


def malformed(plan: Plan) -> str | None:
    """Describes the first malformed field in a few words; None if all are well-formed."""
    return next(_faults(plan), None)


def _faults(plan: Plan) -> Iterator[str]:
    missing = [name for name in Plan.__slots__ if not hasattr(plan, name)]
    if missing:
        yield f"its field {missing[0]} was deleted"
        return
    for name, kind in (
        ("requests", list),
        ("num_tokens", list),
        ("preempt", list),
        ("reject", list),
        ("reserve", dict),
    ):
        value = getattr(plan, name)
        if not isinstance(value, kind):
            yield f"{name} is {_shown(value)}, not a {kind.__name__}"
            return  # its entries cannot be checked
    if len(plan.requests) != len(plan.num_tokens):
        yield f"{len(plan.requests)} requests, but {len(plan.num_tokens)} token counts"
    for name in ("requests", "preempt", "reserve"):
        yield from (
            f"{name} holds {_shown(entry)}, not a Request"
            for entry in getattr(plan, name)
            if not isinstance(entry, Request)
        )
    yield from (
        f"num_tokens holds {_shown(count)}, not a whole number" for count in plan.num_tokens if not _whole(count)
    )
    yield from (
        f"reject holds {_shown(entry)}, not a (Request, reason)" for entry in plan.reject if not _rejection(entry)
    )
    yield from (
        f"reserve holds {_shown(tokens)}, not a whole number" for tokens in plan.reserve.values() if not _whole(tokens)
    )
    if plan.pad_to is not None and not _whole(plan.pad_to):
        yield f"pad_to is {_shown(plan.pad_to)}, not a whole number or None"
    if plan.wake_at is not None and not (isinstance(plan.wake_at, Real) and isfinite(plan.wake_at)):
        yield f"wake_at is {_shown(plan.wake_at)}, not a time in seconds or None"
    if not isinstance(plan.note, str):
        yield f"note is {_shown(plan.note)}, not text"


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _rejection(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], Request) and isinstance(entry[1], str)


def _shown(value: Any) -> str:
    """Returns a short one-line repr, or the class where repr raises."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"an object of {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}..."
