"""Options of a group with arguments, so that a sweep can give each policy different arguments.

    policy='sarathi_serve,mine.SRPT(oracle=true,false)'     three runs: Sarathi-Serve, and SRPT with and without an oracle

Hydra composes files. Each option with arguments becomes an option in Hydra's ConfigStore, which launchers pass to other processes.
"""

import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser, create_functions
from hydra.errors import HydraException
from omegaconf import OmegaConf

from cbatch import ConfigError
from experiments.settings.construct import BY_IMPORT_PATH
from experiments.settings.settings import GROUPS

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_PART = re.compile(rf"\s*(?P<group>{'|'.join(BY_IMPORT_PATH)})=(?P<options>.*)", re.DOTALL)
_OPTION = re.compile(r"(?P<name>[\w.-]+)(\((?P<arguments>.*)\))?", re.DOTALL)
_NOT_IN_A_NAME = re.compile(r"[^\w.,=()+-]+")
_NESTED = re.compile(r"""['"()\[\]{}]""")
_OBJECT = re.compile(r"\s*\{([^{}]*,)?\s*_target_\s*:")
_NAMES = ("output", "sweep")  # their single value may contain commas
_OBJECTS = re.compile(r"backend\.router|\+backend\.pools\.[\w-]+\.router|workload\.(arrivals|lengths)")
"""Keys that take the import path of a class, too."""

_BY_NAME = re.compile(
    r"workload\.(clients|tiers|lengths\.parts)|backend\.pools|metrics\.client_weights|policy\.weights"
)
"""Keys with entries under names of the user's choice."""

_PAIRS = {")": "(", "]": "[", "}": "{"}


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides in the form that Hydra reads.

    Options with arguments are replaced by plain names, which Hydra then knows. Text with = is quoted, since run names contain settings.
    An object, {_target_: a.B, mean: 3} or a.B(mean=3), replaces the object of a preset, and entries by name, such as clients, replace
    the preset's; Hydra would mix both.

    Raises ConfigError if arguments cannot be read.
    """
    plain = []
    for override in overrides:
        group, _, value = override.partition("=")
        if _OBJECTS.fullmatch(group):
            value = ",".join(text for piece in _split(value) for text in _objects(group, piece))
            override = f"{group}={value}"
        named = group in GROUPS and value.partition("(")[0] not in create_functions().functions
        whole = not _NESTED.search(value) and ("," not in value or group in _NAMES)
        if "=" in value and (whole or os.path.exists(value)):
            override = f"{group}={value!r}"
        pieces = _pieces(value) if named and ("(" in value or "." in value) else []
        if any("(" in piece or _is_import_path(group, piece) for piece in pieces):
            override = f"{group}={','.join(map(repr, option_names(group, value)))}"
        starts = re.compile(r"\s*\{") if _BY_NAME.fullmatch(group) else _OBJECT
        replaces = group[:1].isalpha() and "." in group and any(map(starts.match, _split(value)))
        # null may be there, which Hydra cannot delete
        plain += [f"{group}=null", f"++{override}"] if replaces else [override]
    return plain


def option_names(group: str, options: str) -> list[str]:
    """Returns the names of comma-separated options in Hydra and in a run's results; stores the options with arguments.

    Raises ConfigError if arguments cannot be read.
    """
    return [name for piece in _pieces(options) for name in _store(group, piece)]


def _pieces(options: str) -> list[str]:
    return [piece.strip(" '\"") for piece in _split(options)]


def _objects(key: str, option: str) -> Iterator[str]:
    """Yields the objects that an import path with arguments describes, for each combination of values; else the option itself."""
    match = _OPTION.fullmatch(option.strip(" '\""))
    if match is None or not _IMPORT_PATH.fullmatch(match["name"]):
        yield option
        return
    arguments = [text.partition("=") for text in _join(key, option, _split(match["arguments"] or ""))]
    for values in product(*(_split(text) for *_, text in arguments)):
        given = [f"{name}:{value}" for (name, *_), value in zip(arguments, values, strict=True)]
        yield f"{{{','.join(['_target_:' + match['name'], *given])}}}"


def _is_import_path(group: str, option: str) -> bool:
    return group in BY_IMPORT_PATH and _IMPORT_PATH.fullmatch(option) is not None


def _store(group: str, option: str) -> Iterator[str]:
    """Stores an option for each combination of its arguments. Yields the names."""
    match = _OPTION.fullmatch(option)
    if match is None:
        raise ConfigError(f"{group}={option}: cannot be read; give NAME or NAME(key=value,...), in quotes")
    name, text = match["name"], match["arguments"]
    if not text and not _is_import_path(group, name):
        yield name
        return
    by_path = _is_import_path(group, name)
    base, defaults = ({"_target_": name}, ["_self_"]) if by_path else ({}, [name, "_self_"])
    for arguments in product(*map(partial(_values, f"{group}={option}"), _join(group, option, _split(text or "")))):
        names = {key: value for key, value in arguments if key in GROUPS and isinstance(value, str)}
        runs_own = [key for key, value in names.items() if "${" in value]  # a section; as a default it would be a copy
        if other := next((key for key, _ in arguments if "." in key and key.partition(".")[0] in runs_own), None):
            raise ConfigError(f"{group}={option}: ${{...}} is the run's own; give {other}= outside the parentheses")
        parts = {f"/{key}@{key}": value for key, value in names.items() if key not in runs_own}
        node = OmegaConf.create({**base, "defaults": [*defaults, *({key: parts[key]} for key in parts)]})
        if any(f"/{key.partition('.')[0]}@{key.partition('.')[0]}" in parts for key, _ in arguments if "." in key):
            node.defaults.remove("_self_")  # composed last: arguments of a part replace those of its preset
            node.defaults.append("_self_")
        for key, value in arguments:
            if f"/{key}@{key}" in parts:
                continue
            OmegaConf.update(node, key, value)
            replaces = isinstance(value, dict) and ("_target_" in value or _BY_NAME.fullmatch(f"{group}.{key}"))
            if replaces and not by_path:
                OmegaConf.update(emptied := OmegaConf.create(), key, None)
                ConfigStore.instance().store(f"null({key})", emptied, group)
                node.defaults.insert(1, f"null({key})")  # between the preset and `_self_`
        args = ",".join(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in arguments)
        stored = _NOT_IN_A_NAME.sub("_", f"{name}({args})" if args else name)
        ConfigStore.instance().store(stored, node, group)
        yield stored


def _join(group: str, option: str, pieces: Sequence[str]) -> list[str]:
    """Rejoins the values of each key, since `a=1,2,b=3` was split at all commas."""
    joined: list[str] = []
    for piece in pieces:
        if re.match(r"\s*[\w.]+=", piece):
            joined.append(piece.strip())
        elif joined:
            joined[-1] += f",{piece}"
        else:
            raise ConfigError(f"{group}={option}: {piece!r} is not of the form key=value; give NAME(key=value,...)")
    return joined


def _values(option: str, argument: str) -> list[tuple[str, Any]]:
    """Returns (key, value) for each value of an argument, which may be a sweep as on Hydra's command line, or an option with arguments."""
    if (part := _PART.fullmatch(argument)) and any("(" in text or "." in text for text in _pieces(part["options"])):
        return [(part["group"], name) for name in option_names(part["group"], part["options"])]
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(argument)
    except HydraException as error:
        problem = f"{argument!r} in its parentheses cannot be read; give key=value, separated by commas"
        raise ConfigError(f"{option}: {problem}") from error
    key = str(override.key_or_group)
    if not override.is_sweep_override():
        return [(key, override.value())]
    return [(key, parser.parse_override(f"{key}={text}").value()) for text in override.sweep_string_iterator()]


def _split(text: str) -> list[str]:
    """Splits at the commas outside brackets and quotes."""
    pieces, open_, quote = [""], [], ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _PAIRS.values():
            open_.append(character)
        elif open_ and _PAIRS.get(character) == open_[-1]:
            open_.pop()
        if character == "," and not quote and not open_:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece for piece in pieces if piece]
