"""Converters: one value, from CSV (text) or JSON (text, number, list), to what it must be, or ValueError saying so."""

from __future__ import annotations

import math
from datetime import datetime

from experiments.workloads.trace import MOST_TOKENS


def whole_number(value: object) -> int:
    if isinstance(value, str):
        value = int(value) if value.strip().removeprefix("-").isdecimal() else None
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise ValueError("must be a whole number")
    return value


def token_count(value: object) -> int:
    """A length. One of 0 is refused: no source has it, and a request without prompt or output cannot be served."""
    try:
        count = whole_number(value)
    except ValueError:
        count = 0
    if not 1 <= count <= MOST_TOKENS:
        raise ValueError("must be a whole number of tokens, at least 1")
    return count


def number(value: object) -> float:
    try:
        result = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise ValueError("must be a finite number")
    return result


def not_negative(value: object) -> float:
    result = number(value)
    if result < 0:
        raise ValueError("must not be negative")
    return result


def timestamp(value: object) -> datetime:
    """A wall-clock time, to 1 us. A time zone, if there is one, is taken to be that of the whole file."""
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        raise ValueError("must be a time such as 2023-11-16 18:15:46.6805900") from None
    return moment if moment.tzinfo is None else moment.replace(tzinfo=None)


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be text")
    return value


def token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
        raise ValueError("must be a list of token ids, at least one, none negative")
    return value


def top_k(value: object) -> int:
    result = whole_number(value)
    if result < 0:
        raise ValueError("must not be negative")
    return result


def top_p(value: object) -> float:
    result = number(value)
    if not 0 < result <= 1:
        raise ValueError("must be above 0, at most 1")
    return result
