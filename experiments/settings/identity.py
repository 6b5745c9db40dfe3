"""Flattens settings to columns for the identity of a run."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

from cbatch.described import name_of_class

_OURS = ("cbatch", "experiments", "policies")


def columns_of(key: str, value: Any, given: Any = None) -> Iterator[tuple[str, Any]]:
    """Yields the columns of a value. given: the section that the value was built from, for an object that is not a dataclass."""
    section = given if isinstance(given, Mapping) else {}
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from columns_of(f"{key}.{name}", item, section.get(name))
    elif is_dataclass(value):
        if "_target_" in section:
            yield key, _name(value)
        for field in fields(value):
            yield from columns_of(f"{key}.{field.name}", getattr(value, field.name), section.get(field.name))
    elif value is None or isinstance(value, str | int | float | list | tuple):
        yield key, _plain(value)
    else:
        yield key, _name(value)
        arguments = {name: item for name, item in section.items() if name != "_target_"}
        yield from columns_of(key, arguments, {})


def _name(value: object) -> str:
    """Returns an object's name, or its class's name; for external classes the whole import path."""
    kind = type(value)
    if kind.__module__.partition(".")[0] not in _OURS:
        return f"{kind.__module__}.{kind.__qualname__}"
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else name_of_class(kind)


def _plain(value: Any) -> Any:
    """Returns a value in a form that JSON preserves."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
