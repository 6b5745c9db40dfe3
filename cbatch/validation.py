"""Validates user input by type: dataclasses declare accepted values, and pydantic checks them. Errors are one line.

    @dataclass(frozen=True)
    class Arrivals:
        rate: Annotated[float, positive("requests per second")]
        seed: Annotated[int, whole(0)] = 0

        def __post_init__(self) -> None:
            check(self, "workload.arrivals.", WorkloadError)

`Arrivals(rate=-1)` raises "workload.arrivals.rate=-1: give a finite number above 0 (requests per second)".

Only modules that read settings and files import this module: it loads pydantic, which takes longer than `import cbatch`.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, partial
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError, with_config
from pydantic_core import CoreSchema, SchemaValidator, core_schema
from typing_extensions import TypeAliasType, TypedDict

from cbatch.errors import CbatchError, ConfigError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Give:
    """Annotates a type with the remedy for error messages. schema: checked in place of the type."""

    wanted: str
    schema: CoreSchema | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = self.schema or handler(source)
        return core_schema.custom_error_schema(schema, "give", custom_error_message=f"give {self.wanted}")


def whole(minimum: int, maximum: int | None = None, unit: str = "number") -> Give:
    """Annotates an int from `minimum` to `maximum`. Accepts 1e3; rejects true and false."""
    integer = partial(core_schema.int_schema, ge=minimum, le=maximum)
    from_float = core_schema.chain_schema([core_schema.float_schema(strict=True), integer(strict=False)])
    limits = f", at least {minimum}" if maximum is None else f" from {minimum} to {maximum}"
    return Give(f"a whole {unit}{limits}", core_schema.union_schema([integer(strict=True), from_float]))


_FINITE = partial(core_schema.float_schema, allow_inf_nan=False, strict=True)


def positive(unit: str) -> Give:
    """Annotates a float: finite and above 0."""
    return Give(f"a finite number above 0 ({unit})", _FINITE(gt=0))


def not_negative(unit: str) -> Give:
    """Annotates a float: finite and at least 0."""
    return Give(f"a finite number, at least 0 ({unit})", _FINITE(ge=0))


Switch = Annotated[
    bool,
    Give("true or false", core_schema.bool_schema(strict=True)),
    BeforeValidator(lambda value: value == "on" if value in ("on", "off") else value),
]
"""A bool: true, false, on or off."""


def check(instance: Any, prefix: str, error: type[CbatchError] = ConfigError) -> None:
    """Checks the fields of a dataclass at the end of its construction, and converts `on`, `off` and mappings to their types.

    prefix: prefix of the fields' names in messages. Raises `error`; for the keys of a mapping ConfigError, like `read`.
    """
    kind: Any = type(instance)
    stated, hints = {field.name: getattr(instance, field.name) for field in fields(kind)}, _hints(kind)
    values = dict(stated)
    for name, value in stated.items():
        if isinstance(value, Mapping) and _holds_dataclass(hints[name]):
            values[name] = read(hints[name], value, f"{prefix}{name}.")
    try:
        accepted = _fields_of(kind).validate_python(values)
    except ValidationError as refusal:
        raise error(refusal_line(refusal, prefix, kind)) from None
    for name, value in accepted.items():
        if stated[name] != value or (type(stated[name]), type(value)) == (float, int):
            object.__setattr__(instance, name, value)


def read(kind: type[T], data: object, prefix: str = "") -> T:
    """Builds a dataclass, including nested dataclasses, from the mappings of a file or configuration.

    Raises ConfigError for an unknown or missing key, or a value of the wrong type; the message names the key.
    """
    try:
        built: T = _reader(kind).validate_python(data)
    except ValidationError as refusal:
        raise ConfigError(refusal_line(refusal, prefix, kind)) from None
    return built


def parse(kind: Any, text: str, key: str) -> Any:
    """Parses a value of a type from text; commas separate the elements of a tuple. Raises ConfigError, which begins with the key."""
    if get_origin(kind) is tuple:
        return tuple(parse(get_args(kind)[0], part, key) for part in text.split(","))
    try:
        return _text_reader(kind).validate_strings(text, strict=True)
    except ValidationError as refusal:
        raise ConfigError(refusal_line(refusal, key)) from None


def nearest(name: str, known: Collection[str]) -> str:
    """Returns `did you mean X? known: X, Y, Z`, for messages.

    X is the first match of: a nearly equal name; a known word in the name, as in chunk_size; the shortest known name that begins with the
    name, ignoring punctuation, as llama-3.1-8b for llama3; the most similar name but none.
    """
    similar = get_close_matches(name, list(known), 1, cutoff=0.9) or [word for word in name.split("_") if word in known]
    similar = similar or [name.lower()] * (name.lower() in known)
    plain = re.sub(r"\W", "", name)
    beginning = [other for other in known if plain and re.sub(r"\W", "", other).startswith(plain)]
    similar = similar or sorted(beginning, key=lambda other: (len(other), other))
    similar = similar or get_close_matches(name, [*filter("none".__ne__, known)], 1)
    hint = f"did you mean {similar[0]}? " if similar else ""
    return f"{hint}known: {', '.join(sorted(known)) or 'none'}"


def check_known(keys: Collection[Any], known: Collection[str], prefix: str = "") -> None:
    """Raises ConfigError for an unknown key; the message suggests the nearest known key."""
    for key in keys:
        if key not in known:
            raise ConfigError(f"{prefix}{key}: no such key; {nearest(str(key), known)}")


def shorten(value: object) -> str:
    """Returns a value on one line, for messages."""
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."


_hints: Any = cache(get_type_hints)
_GIVE = partial(core_schema.custom_error_schema, custom_error_type="give")


def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Returns an adapter that refuses unknown keys. pydantic takes a configuration for the alias of a dataclass only."""
    alias: Any = TypeAliasType("Read", kind)
    return TypeAdapter(alias, config=ConfigDict(extra="forbid"))


def _exact_reader(kind: Any) -> SchemaValidator:
    """Returns a validator for values of a file or configuration, whose numbers are not text, true or false."""
    return SchemaValidator(_exact(_adapter(kind).core_schema))


def _exact(schema: Any) -> Any:
    """Returns a schema of pydantic with exact types of numbers, where it says nothing about that."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_exact, schema))
    if not isinstance(schema, dict):
        return schema
    strict = {**schema, "strict": True}
    match schema:
        case {"type": "float" | "int", "strict": _}:
            return schema
        case {"type": "float"}:
            return _GIVE(strict, custom_error_message="give a number")
        case {"type": "int"}:
            from_float = core_schema.chain_schema([core_schema.float_schema(strict=True), schema])
            either = core_schema.union_schema([strict, from_float])
            return _GIVE(either, custom_error_message="give a whole number")
    kept = ("metadata", "default", "keys_schema")  # keys of JSON are text
    return {key: part if key in kept else _exact(part) for key, part in schema.items()}


_text_reader: Any = cache(_adapter)
_reader: Any = cache(_exact_reader)


@cache
def _fields_of(kind: Any) -> TypeAdapter[Any]:
    """Returns an adapter for the fields of a dataclass. An adapter for the class itself would call `check` endlessly."""
    hints = get_type_hints(kind, include_extras=True)
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    names: Any = {field.name: hints[field.name] for field in fields(kind)}
    return TypeAdapter(with_config(config)(TypedDict("Fields", names)))  # type: ignore[operator]


def _holds_dataclass(hint: Any) -> bool:
    return is_dataclass(hint) or any(map(_holds_dataclass, get_args(hint)))


def refusal_line(refusal: ValidationError, prefix: str, kind: Any = None) -> str:
    """Returns one error of pydantic as a line that begins with the key. prefix: prefix of the key. kind: the class, for hints.

    An unknown key comes before a missing one, which may be the same key, misspelt.
    """
    errors = refusal.errors(include_url=False)
    first = next((error for error in errors if error["type"] in _UNKNOWN), errors[0])
    steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"] if step != "[key]")
    key = f"{prefix}{steps.removeprefix('.')}".rstrip(".")
    key = key if key.isprintable() else repr(key)
    match first["type"]:
        case "missing":
            return f"{key}: is missing; give {key}=..."
        case unknown if unknown in _UNKNOWN:
            *places, name = first["loc"]
            for place in places:
                kind = _part_of(kind, place)
            hint = nearest(str(name), _hints(_plain(kind))).rpartition("known:")[0] if kind else ""
            return f"{key}: is not supported; {hint}{'otherwise ' if hint else ''}leave it out"
        case "value_error":
            return f"{key}: {first['ctx']['error']}"
        case "bool_type" | "bool_parsing":
            return f"{key}={shorten(first['input'])}: give true or false"
        case "literal_error":
            return f"{key}={shorten(first['input'])}: give {first['ctx']['expected']}"
    if first["type"] in _NO_MAPPING and kind is not None and key:
        for place in first["loc"]:
            kind = _part_of(kind, place)
        plain = _plain(kind)
        names = ", ".join(f"{name}: ..." for name in _hints(plain)) if is_dataclass(plain) else "NAME: {...}"
        return f"{key}={shorten(first['input'])}: give {key}={{{names}}}, or some of these keys"
    given = repr(first["input"]) if kind and _is_quoted(first["input"]) else first["input"]
    return f"{key}={shorten(given)}: {first['msg']}" if key else first["msg"]


def _is_quoted(value: object) -> bool:
    """Returns whether a value is a text that looks like a number or a switch."""
    return isinstance(value, str) and re.fullmatch(r"(?i)[-+\d.e]*\d|true|false|null", value) is not None


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's types of the error for an unknown key

_NO_MAPPING = ("dataclass_type", "dataclass_exact_type", "dict_type")
"""pydantic's types of the error for a value in place of keys."""


def _part_of(kind: Any, place: str | int) -> Any:
    """Returns the type of an item, of a value by its key, or of a field."""
    return get_args(_plain(kind))[-1] if get_origin(_plain(kind)) else _hints(_plain(kind))[place]


def _plain(kind: Any) -> Any:
    """Returns a type without `| None`."""
    return next(part for part in get_args(kind) if part is not NoneType) if NoneType in get_args(kind) else kind
