"""`python -m experiments.paper NAME [key=value ...]`: one comparison with the paper, or what it needs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module

from cbatch import CbatchError, ConfigError

COMMANDS = {
    "a6000": "write the profile of the A6000 with LLaMA-13B from the paper's printed numbers",
    "closure": "Table 4 and Figs 9, 11 and 13 from single-iteration times",
    "fig12": "bubbles and throughput of GPT-3 on 64 A100s",
    "served": "a run that others served and measured, against its simulation",
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, *(f"  {name:8} {what}" for name, what in COMMANDS.items()), sep="\n")
        return 0
    try:
        name, options = _parse(arguments)
        command = import_module(f"experiments.paper.{name}").main
        _check(name, options, inspect.signature(command).parameters)
        return command(**options) or 0
    except CbatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130


def _parse(arguments: list[str]) -> tuple[str, dict[str, str]]:
    name = arguments[0]
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"command {name!r} is unknown; {hint}known: {', '.join(COMMANDS)}")
    pairs = [argument.partition("=") for argument in arguments[1:]]
    wrong = [key for key, equals, _ in pairs if not equals]
    if wrong:
        raise ConfigError(f"option {wrong[0]!r} is not of the form key=value")
    return name, {key: value for key, _, value in pairs}


def _check(name: str, options: Mapping[str, str], parameters: Mapping[str, inspect.Parameter]) -> None:
    for key, value in options.items():
        if key not in parameters:
            raise ConfigError(f"{key}={value}: {name} has no such option; known: {', '.join(parameters) or 'none'}")
    for key, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and key not in options:
            raise ConfigError(f"{name} needs {key}=...; see the docstring of experiments/paper/{name}.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
