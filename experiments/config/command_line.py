"""How commands read their lines and how they end: key=value options by a function's parameters, one status for each end.

It knows no command. The settings of a run are read by Hydra instead: see `experiments.run`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from cbatch import ConfigError
from cbatch.validation import nearest
from experiments.config.error_lines import one_line

HELP = frozenset({"-h", "--help"})


class AtLeast(NamedTuple):
    """Annotates the type of a number: the least that is accepted, and what a message asks for."""

    minimum: int
    wanted: str = "a whole number, at least {minimum}"


Count = Annotated[int, AtLeast(1)]


def run(
    command: Callable[..., int | None],
    arguments: Sequence[str],
    usage: Callable[[], str],
    *,
    bare: bool = False,
    interrupted: str = "interrupted",
) -> int:
    """Run a command to its end; what the user did wrong is one line on stderr.

    Args:
        command: takes the arguments one by one.
        usage: what --help prints, and a line without arguments unless the command can do with a `bare` one.
        interrupted: what is said after Ctrl-C.

    Returns:
        The exit status: the command's own, or 0; 2 for a mistake of the user's; 130 after Ctrl-C.
    """
    if HELP & set(arguments) or not (arguments or bare):
        print(usage())
        return 0 if arguments else 2
    try:
        for argument in arguments:
            if argument.startswith("-"):
                raise no_such_option(argument)
        return command(*arguments) or 0
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        return 130
    except Exception as error:
        message = one_line(error, arguments)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return 2


def listed(names: Mapping[str, str]) -> str:
    """Names and what each is, a line each, for usages."""
    return "\n".join(f"  {name:18} {what}" for name, what in names.items())


def no_such_option(option: str) -> ConfigError:
    """The error for an option with dashes that no command has."""
    return ConfigError(f"{option}: no such option; give key=value, without dashes, or --help to see what there is")


def check_name(kind: str, name: str, known: Mapping[str, str]) -> None:
    """Raise ConfigError for a name that is not known, with the nearest one that is."""
    if name not in known:
        raise ConfigError(f"{kind} {name}: no such {kind}; {nearest(name, known)}")


def beginning_with(key: str, beginnings: str, known: Iterable[str]) -> list[str]:
    """The names that begin with one of those given.

    Args:
        key: whose value they are. beginnings: separated by ";"; empty: all.

    Raises:
        ConfigError: one of them fits no name.
    """
    names, given = list(known), tuple(beginnings.split(";"))
    for beginning in given:
        if not any(name.startswith(beginning) for name in names):
            raise ConfigError(f"{key}: none begins with {beginning!r}; known: {'; '.join(names)}")
    return [name for name in names if name.startswith(given)]


def keyword_arguments(function: Callable[..., Any], options: Sequence[str], command: str) -> dict[str, Any]:
    """key=value options as keyword arguments of a function, each of its parameter's type.

    Args:
        function: its parameters are annotated with str, int, float, such a number with `AtLeast`, or a tuple of any number of
            one of these, which is given with commas between. What is no option is bound beforehand, by `functools.partial`
            and by position.
        command: its name in messages.

    Raises:
        ConfigError: an option that is not of the form key=value, an unknown key, a value that is not of the type, or no value
            for a parameter without a default.
    """
    parameters = inspect.signature(function, eval_str=True).parameters
    values = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals:
            raise ConfigError(f"{command}: option {option!r} is not of the form key=value; see --help")
        if key not in parameters:
            raise ConfigError(f"{command}: {key}: no such key; {nearest(key, parameters)}")
        values[key] = _value(command, key, text, parameters[key].annotation)
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in values:
            raise ConfigError(f"{command} needs {key}=...; see the docstring of {_module(function)}")
    return values


def _value(command: str, key: str, text: str, annotation: Any) -> Any:
    if annotation in (str, str | None):
        return text
    if get_origin(annotation) is tuple:
        element, _ = get_args(annotation)
        return tuple(_value(command, key, part, element) for part in text.split(","))
    number, *limits = get_args(annotation) or (annotation,)
    with suppress(ValueError):
        found = number(text)
        if all(found >= limit.minimum for limit in limits):
            return found
    wanted = limits[0].wanted.format(minimum=limits[0].minimum) if limits else f"{key}=NUMBER"
    raise ConfigError(f"{command}: option {key}={text}: give {wanted}")


def _module(function: Callable[..., Any]) -> str:
    return str(getattr(function, "func", function).__module__)
