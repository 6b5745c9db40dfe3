"""`python -m experiments.bench NAME [key=value ...]`: run one benchmark, print its table, write its results file."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module

from cbatch import CbatchError, ConfigError

BENCHMARKS = {
    "host": "host time of an iteration against running and waiting requests (no GPU)",
    "sim": "simulated iterations a second (no GPU)",
}


def main(arguments: list[str]) -> int:
    try:
        name, options = _parse(arguments)
        import_module(f"experiments.bench.{name}").main(**options)
    except CbatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def _parse(arguments: list[str]) -> tuple[str, dict[str, str]]:
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {name:8} {what}" for name, what in BENCHMARKS.items()]
        raise ConfigError("name a benchmark: python -m experiments.bench NAME\n" + "\n".join(lines))
    name = arguments[0]
    if name not in BENCHMARKS:
        near = get_close_matches(name, BENCHMARKS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"benchmark {name!r} is unknown; {hint}known: {', '.join(BENCHMARKS)}")
    pairs = [argument.partition("=") for argument in arguments[1:]]
    wrong = [key for key, equals, _ in pairs if not equals]
    if wrong:
        raise ConfigError(f"option {wrong[0]!r} is not of the form key=value")
    return name, {key: value for key, _, value in pairs}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
