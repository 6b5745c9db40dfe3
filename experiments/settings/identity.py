"""The identity of a run, as a flat dictionary: a stored run counts as finished if its identity and code equal the wanted ones."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

from cbatch.described import name_of_class
from experiments.settings.settings import Settings

_NO_VALUES = ("policy", "chosen", "composed")
_OURS = ("cbatch", "experiments", "policies")


def identity(settings: Settings) -> dict[str, Any]:
    """Returns everything that a run depends on but its code, nested keys joined by ".": plain values, as JSON keeps them.

    The key `policy` has the policy's text, `sarathi(chunk=256)`; the keys that begin with `policy.` have its arguments.
    """
    section = settings.policy.section
    columns = {"policy": repr(settings.policy), **dict(_columns("policy", section, {}))}
    for field in fields(settings):
        if field.name not in (*_NO_VALUES, *settings.without_effect):
            given = settings.composed.keys.get(field.name)
            columns.update(_columns(field.name, getattr(settings, field.name), given))
    return columns


def _columns(key: str, value: Any, given: Any) -> Iterator[tuple[str, Any]]:
    """Yields the columns of a value. given: the section that it was built from, for an object that is not a dataclass."""
    section = given if isinstance(given, Mapping) else {}
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _columns(f"{key}.{name}", item, section.get(name))
    elif is_dataclass(value):
        if "_target_" in section:
            yield key, _name(value)
        for field in fields(value):
            yield from _columns(f"{key}.{field.name}", getattr(value, field.name), section.get(field.name))
    elif value is None or isinstance(value, str | int | float | list | tuple):
        yield key, _plain(value)
    else:
        yield key, _name(value)
        arguments = {name: item for name, item in section.items() if name != "_target_"}
        yield from _columns(key, arguments, {})


def _name(value: object) -> str:
    """Returns the name that an object has, or that of its class; the whole path of a class from outside."""
    kind = type(value)
    if kind.__module__.partition(".")[0] not in _OURS:
        return f"{kind.__module__}.{kind.__qualname__}"
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else name_of_class(kind)


def _plain(value: Any) -> Any:
    """Returns a value that JSON preserves."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
