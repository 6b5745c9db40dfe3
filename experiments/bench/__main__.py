"""`python -m experiments.bench NAME [key=value ...]`: run one benchmark, print its table, write its results file."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from cbatch import ConfigError
from experiments.settings.command_line import check_name, keyword_arguments, listed, run
from experiments.settings.this_machine import count_gpus

BENCHMARKS = {
    "host": "host time of an iteration against running and waiting requests, and of a plan by policy (no GPU needed)",
    "sim": "simulated iterations per second (no GPU needed)",
    "graphs": "batches of 1 to 64: operation by operation, compiled, and with captured graphs",
    "pd": "throughput against the ratio of prompt to output tokens, by policy",
    "trace": "throughput on a recorded trace, by policy",
}

WITHOUT_GPU = "(no GPU needed)"


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    return run_benchmark(
        arguments, BENCHMARKS, {name: f"experiments.bench.{name}" for name in BENCHMARKS}, str(__doc__)
    )


def run_benchmark(
    arguments: Sequence[str], benchmarks: Mapping[str, str], modules: Mapping[str, str], usage: str
) -> int:
    """Runs `main` of the module of the benchmark that a command line names; returns the exit status."""

    def bench(name: str, *options: str) -> None:
        check_name("benchmark", name, benchmarks)
        if WITHOUT_GPU not in benchmarks[name] and count_gpus() == 0:
            others = [other for other, what in benchmarks.items() if WITHOUT_GPU in what]
            raise ConfigError(f"benchmark {name} needs a GPU and finds none; these need none: {', '.join(others)}")
        benchmark = import_module(modules[name]).main
        benchmark(**keyword_arguments(benchmark, options, name))

    interrupted = "interrupted; files already written are complete"
    return run(bench, arguments, lambda: f"{usage}\n{listed(benchmarks)}", interrupted=interrupted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
