"""`python -m experiments.bench NAME [key=value ...]`: run one benchmark, print its table, write its results file."""

from __future__ import annotations

import inspect
import sys
from difflib import get_close_matches
from importlib import import_module

from cbatch import CbatchError, ConfigError
from experiments.backends import count_gpus
from experiments.settings import check_known

BENCHMARKS = {
    "host": "host time of an iteration against running and waiting requests (no GPU)",
    "sim": "simulated iterations a second (no GPU)",
    "step": "one decode iteration in a graph, and where its time goes",
    "tiles": "time of an iteration against its tokens",
    "async": "the asynchronous loop against the synchronous one",
    "graphs": "one request: operation by operation, compiled, and with captured graphs",
    "pd": "throughput against the ratio of prompt to output tokens, by policy",
    "trace": "throughput on a recorded trace, by policy",
    "report": "docs/performance.md and docs/lanes, written from what was measured (no GPU)",
}

WITHOUT_GPU = "(no GPU)"

MODULES = {"async": "overlap", "report": "performance"}
"""Where a benchmark's name cannot be a module's."""


def main(arguments: list[str]) -> int:
    try:
        name, options = _parse(arguments)
        if WITHOUT_GPU not in BENCHMARKS[name] and count_gpus() == 0:
            raise ConfigError(f"benchmark {name} needs a GPU and finds none; host and sim run without one")
        run = import_module(f"experiments.bench.{MODULES.get(name, name)}").main
        check_known(options, inspect.signature(run).parameters, f"{name}: ")
        run(**options)
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
