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
    "host": "host time of an iteration against running and waiting requests (no GPU needed)",
    "sim": "simulated iterations a second (no GPU needed)",
    "vidur": "a whole simulated run as one process, on a workload that Vidur was timed on (no GPU needed)",
    "checks": "what runtime.check=races costs, on a GPU if there is one (no GPU needed)",
    "step": "one decode iteration in a graph, and where its time goes",
    "tiles": "time of an iteration against its tokens",
    "async": "the asynchronous loop against the synchronous one",
    "loops": "both loops with no graphs, graphs of decodes, and graphs of all iterations, on mixed traffic",
    "graphs": "batches of 1 to 64: operation by operation, compiled, and with captured graphs",
    "graph_memory": "device memory of captured graphs: one pool, or a pool for each",
    "pd": "throughput against the ratio of prompt to output tokens, by policy",
    "trace": "throughput on a recorded trace, by policy",
    "fidelity": "simulated runs against real ones, by policy; for kept ones, measured=FILE (no GPU needed)",
    "report": "docs/performance.md and docs/lanes, written from what was measured (no GPU needed)",
}

WITHOUT_GPU = "(no GPU needed)"

MODULES = {"async": "overlap", "report": "performance"}
"""Where a benchmark's name cannot be a module's."""


def main(arguments: list[str]) -> int:
    try:
        name, options = _parse(arguments)
        if WITHOUT_GPU not in BENCHMARKS[name] and count_gpus() == 0:
            raise ConfigError(f"benchmark {name} needs a GPU and finds none; host, sim and checks need none")
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
        lines = [f"  {name:12} {what}" for name, what in BENCHMARKS.items()]
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
