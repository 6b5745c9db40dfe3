"""One-line errors for settings that a workload cannot use: the key as it is overridden, the value, the remedy."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import TypeGuard

from cbatch.errors import WorkloadError


def bad_setting(key: str, value: object, remedy: str) -> WorkloadError:
    """The error to raise for `workload.<key>`."""
    return WorkloadError(f"workload.{key}={value}: {remedy}")


def check_positive(key: str, value: object, unit: str) -> None:
    """Raise WorkloadError unless the value is a finite number above 0."""
    if not (is_number(value) and value > 0):
        raise bad_setting(key, value, f"give a finite number above 0 ({unit})")


def check_not_negative(key: str, value: object, unit: str) -> None:
    """Raise WorkloadError unless the value is a finite number, at least 0."""
    if not (is_number(value) and value >= 0):
        raise bad_setting(key, value, f"give a finite number, at least 0 ({unit})")


def check_whole(key: str, value: object, minimum: int) -> None:
    """Raise WorkloadError unless the value is a whole number, at least `minimum`."""
    if not (is_whole(value) and value >= minimum):
        raise bad_setting(key, value, f"give a whole number, at least {minimum}")


def check_at_most(key: str, value: float, maximum: int) -> None:
    """Raise WorkloadError for a number too large to be meant."""
    if value > maximum:
        raise bad_setting(key, value, f"give at most {maximum}")


def check_choice(key: str, value: object, choices: Collection[str]) -> None:
    """Raise WorkloadError unless the value is one of the choices."""
    if value not in choices:
        raise bad_setting(key, value, f"give one of {', '.join(choices)}")


def check_part(key: str, value: object, method: str) -> None:
    """Raise WorkloadError unless the value is an object with this method, as a section with a `_target_` makes one."""
    if not callable(getattr(value, method, None)):
        raise bad_setting(key, value, f"give keys of it, as in workload.{key}._target_=...; it must have {method}()")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether the value is a whole number, True and False excepted."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a finite number, True and False excepted."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
