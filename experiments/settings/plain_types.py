"""Compares values of the configuration with the annotations of the parameters that they are for."""

from collections.abc import Mapping, Sequence
from inspect import isclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", NoneType: "null"}
"""Types of values on a command line, with their names in errors."""

_LISTS, _MAPPINGS = (Sequence, list), (Mapping, dict)
_OURS = ("cbatch", "policies", "experiments")
"""Packages whose classes are built from the keys of a section, never from a plain value."""


def fits(value: object, annotation: Any) -> bool | None:
    """Returns whether a value is of an annotated type; None if that depends on a type which is unknown here."""
    return _any([_fits_part(value, part) for part in _parts(annotation)])


def words_of(annotation: Any) -> str:
    """Returns the values that `fits` knows to be of an annotated type, for errors; empty if there are none."""
    words = [_words_of_part(part) for part in _parts(annotation)]
    return " or ".join(sorted(filter(None, words), key="null".__eq__))


def _parts(annotation: Any) -> Sequence[Any]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _fits_part(value: object, part: Any) -> bool | None:
    if isclass(part) and part in _PLAIN:
        is_nan = value != value  # which no parameter can use: all comparisons with it are false
        return not is_nan and (type(value) is part or (type(value) is int and part is float))
    if (kind := get_origin(part)) in _LISTS:
        return isinstance(value, list) and _all([fits(item, get_args(part)[0]) for item in value])
    if kind in _MAPPINGS:
        return isinstance(value, Mapping) and _all([fits(item, get_args(part)[1]) for item in value.values()])
    return False if _is_ours(part) and type(value) in (*_PLAIN, list) else None


def _words_of_part(part: Any) -> str:
    if isclass(part) and part in _PLAIN:
        return _PLAIN[part]
    if (kind := get_origin(part)) in _LISTS:
        return f"a list, each item {item}" if (item := words_of(get_args(part)[0])) else ""
    if kind in _MAPPINGS:
        return f"values by name, each {item}" if (item := words_of(get_args(part)[1])) else ""
    return f"the keys of {part.__name__}" if _is_ours(part) else ""


def _is_ours(part: Any) -> bool:
    return isclass(part) and part.__module__.partition(".")[0] in _OURS


def _any(answers: Sequence[bool | None]) -> bool | None:
    return True if True in answers else None if None in answers else False


def _all(answers: Sequence[bool | None]) -> bool | None:
    return False if False in answers else None if None in answers else True
