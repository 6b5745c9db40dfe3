"""Prints objects as they are written on the command line: `sarathi(chunk=256)`, `trail(c=0.5, chunk=256)`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from graphlib import CycleError, TopologicalSorter
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any


class Described:
    """Prints an object as its name and the arguments that differ from their defaults.

    The class must keep each argument in an attribute of the same name. Seeds are not printed: runs that differ only in seeds are
    replications of one run. An argument whose own class has `inlined = True` is replaced by that object's arguments.
    """

    def __repr__(self) -> str:
        return describe(name_of_class(type(self)), arguments_of(self))


def describe(name: str, arguments: Mapping[str, Any]) -> str:
    """Returns `name(argument=value, ...)`, or only the name."""
    shown = ", ".join(filter(None, (_argument(key, value) for key, value in arguments.items())))
    return f"{name}({shown})" if shown else name


def arguments_of(described: object) -> dict[str, Any]:
    """Returns an object's arguments that differ from their defaults, read from its attributes, without seeds."""
    kind = type(described)
    made: dict[str, Any] = {}
    if is_dataclass(kind):
        made = {field.name: field.default_factory for field in fields(kind)}
    arguments = {}
    for key, parameter in signature(kind).parameters.items():
        factory = made.get(key, MISSING)
        default = parameter.default if factory is MISSING else factory()
        value = getattr(described, key, default)
        if key != "seed" and value != default and repr(value) != repr(default):
            arguments[key] = value
    return arguments


def name_of_class(kind: type) -> str:
    """Returns the name of a class in snake case, as its module spells it if that has the same name: tile_aligned, qoserve."""
    module = kind.__module__.rpartition(".")[2]
    if module.replace("_", "") == kind.__name__.lower():
        return module
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind.__name__).lower()


def without_shared(texts: Iterable[str]) -> dict[str, str]:
    """Returns short texts of objects, by text: without the arguments that all objects of a name have in common."""
    parts = {text: (text.partition("(")[0], _split(text.partition("(")[2][:-1])) for text in texts}
    short = {}
    for text, (name, arguments) in parts.items():
        alike = [{*others} for other, others in parts.values() if other == name]
        shared = set.intersection(*alike) if len(alike) > 1 else set[str]()
        own = ", ".join(argument for argument in arguments if argument not in shared)
        short[text] = f"{name}({own})" if own else name
    return short


def merge_orders(texts: Iterable[str]) -> list[str]:
    """Returns the names of the arguments of objects of one class, in an order that all texts have; empty if there is none."""
    sorter = TopologicalSorter[str]()
    for names in ([*(_shown(text) or ())] for text in sorted({*texts})):
        for place, name in enumerate(names):
            sorter.add(name, *names[:place])
    try:
        return [*sorter.static_order()]
    except CycleError:
        return []


def with_arguments(text: str, arguments: Mapping[str, Any], order: Sequence[str] = ()) -> str:
    """Returns an object's text with further arguments, those of an argument's own object as `drafting.k`; texts of another form as they are.

    order: of the names of arguments; others follow.
    """
    if (shown := _shown(text)) is None:
        return text
    for key, value in arguments.items():
        head, _, inner = key.partition(".")
        if not inner:
            shown.setdefault(head, text_of(value))
        elif head in shown:
            shown[head] = with_arguments(shown[head], {inner: value})
    names = [*(name for name in order if name in shown), *(name for name in shown if name not in order)]
    kind = text.partition("(")[0]
    return f"{kind}({', '.join(f'{name}={shown[name]}' for name in names)})" if names else kind


def _shown(text: str) -> dict[str, str] | None:
    """Returns the arguments in an object's text; None for a text of another form."""
    name, _, rest = text.partition("(")
    parts = [argument.partition("=") for argument in _split(rest[:-1]) if argument]
    if not name.isidentifier() or rest[-1:] not in ("", ")") or not all(mark for _, mark, _ in parts):
        return None
    return {key: value for key, _, value in parts}


def _split(arguments: str) -> list[str]:
    """Splits a text at the commas that are in no brackets."""
    depths = accumulate((mark in "([{") - (mark in ")]}") for mark in arguments)
    marks = enumerate(zip(arguments, depths, strict=True))
    ends = [place for place, (mark, depth) in marks if mark == "," and not depth]
    return [arguments[begin + 1 : end].strip() for begin, end in pairwise([-1, *ends, len(arguments)])]


def class_name(text: str) -> str:
    """Returns an object's text without the modules of an import path: Aging(free=0.1) for my_routers.Aging(free=0.1)."""
    return re.sub(r"^(?:[^\W\d]\w*\.)+(?=[^\W\d])", "", text)


def text_of(value: object) -> str:
    """Returns a value as on a command line: a path's last part, and the class name of objects without a `__repr__`."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}" if float(f"{value:g}") == value else repr(value)
        case str():
            return value.rstrip("/").rpartition("/")[2]
        case Mapping():
            return "{" + ", ".join(f"{key}: {text_of(item)}" for key, item in value.items()) + "}"
        case Sequence():
            return "[" + ",".join(map(text_of, value)) + "]"
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)


def _argument(key: str, value: object) -> str:
    if isinstance(value, Described) and vars(type(value)).get("inlined"):
        return ", ".join(_argument(*inner) for inner in arguments_of(value).items())
    return f"{key}={text_of(value)}"
