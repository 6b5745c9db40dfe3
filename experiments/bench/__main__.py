"""`python -m experiments.bench NAME [key=value ...]`: run one benchmark, print its table, write its results file."""

import sys
from collections.abc import Sequence
from importlib import import_module

from cbatch import ConfigError
from experiments.settings.command_line import check_name, keyword_arguments, listed, run
from experiments.settings.this_machine import count_gpus

BENCHMARKS = {
    "host": "host time of an iteration against running and waiting requests, and of a plan by policy (no GPU needed)",
    "sim": "simulated iterations per second (no GPU needed)",
    "coverage": "how often the intervals of capacities and means cover the truth, on queues that are known (no GPU needed)",
    "vidur": "a whole simulated run as one process, on a workload that Vidur was timed on (no GPU needed)",
    "million": "a million requests of ServeGen through one policy: time and memory of one process (no GPU needed)",
    "checks": "the cost of runtime.check=races, on a GPU if there is one (no GPU needed)",
    "attention": "attention of decodes against the bytes that it reads, for even and uneven contexts",
    "tiles": "time of an iteration against its tokens",
    "async": "the asynchronous loop against the synchronous one",
    "loops": "both loops with no graphs, graphs of decodes, and graphs of all iterations, on mixed traffic",
    "graphs": "batches of 1 to 64: operation by operation, compiled, and with captured graphs",
    "graph_memory": "device memory of captured graphs: one shared pool, or one each",
    "pd": "throughput against the ratio of prompt to output tokens, by policy",
    "pipeline": "throughput and bubbles of pipeline stages, a GPU each, by policy, and of one GPU; simulated, hardware=h200 (no GPU needed)",
    "tensor": "throughput and decode iterations of tensor parallelism, a GPU for each rank; simulated, hardware=h200 (no GPU needed)",
    "trace": "throughput on a recorded trace, by policy",
    "vllm": "vLLM by its own rule and under policies, alternating on one engine: throughput and host time",
    "vllm_serving": "the same as a server, driven by `vllm bench serve` at shares of its capacity",
    "vllm_simulated": "the runs of vllm_serving beside simulations with a profile of vLLM (no GPU needed)",
    "fidelity": "simulated runs against real ones, by policy; for kept ones, measured=FILE (no GPU needed)",
    "capacity": "capacities with real tokens beside simulated ones, by policy; for kept runs, measured=FILE (no GPU needed)",
    "stale": "which stored results rest on modules that changed since they were measured, from git's history (no GPU needed)",
    "report": "docs/performance.md, written from what was measured (no GPU needed)",
}

WITHOUT_GPU = "(no GPU needed)"

MODULES = {
    "async": "async_loop",
    "report": "performance",
    "vllm": "in_vllm.offline",
    "vllm_serving": "in_vllm.serving",
    "vllm_simulated": "in_vllm.simulated",
}
"""Modules of benchmarks whose names are not module names."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    return run(_bench, arguments, _usage, interrupted="interrupted; files already written are complete")


def _bench(name: str, *options: str) -> None:
    check_name("benchmark", name, BENCHMARKS)
    if WITHOUT_GPU not in BENCHMARKS[name] and count_gpus() == 0:
        others = [other for other, what in BENCHMARKS.items() if WITHOUT_GPU in what]
        raise ConfigError(f"benchmark {name} needs a GPU and finds none; these need none: {', '.join(others)}")
    benchmark = import_module(f"experiments.bench.{MODULES.get(name, name)}").main
    benchmark(**keyword_arguments(benchmark, options, name))


def _usage() -> str:
    return f"{__doc__}\n{listed(BENCHMARKS)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
