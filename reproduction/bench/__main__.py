"""`python -m reproduction.bench NAME [key=value ...]`: run one benchmark, print its table, write its results file."""

import sys
from collections.abc import Sequence

from experiments.bench.__main__ import run_benchmark

BENCHMARKS = {
    "coverage": "how often the intervals of capacities and means cover the truth, on queues that are known (no GPU needed)",
    "vidur": "a whole simulated run as one process, on a workload that Vidur was timed on (no GPU needed)",
    "million": "a million requests of ServeGen through one policy: time and memory of one process (no GPU needed)",
    "attention": "attention of decodes against the bytes that it reads, for even and uneven contexts",
    "tiles": "time of an iteration against its tokens",
    "async": "the asynchronous loop against the synchronous one",
    "loops": "both loops with no graphs, graphs of decodes, and graphs of all iterations, on mixed traffic",
    "graph_memory": "device memory of captured graphs: one shared pool, or one each",
    "pipeline": "throughput and bubbles of pipeline stages, a GPU each, by policy, and of one GPU; simulated, hardware=h200 (no GPU needed)",
    "tensor": "throughput and decode iterations of tensor parallelism, a GPU for each rank; simulated, hardware=h200 (no GPU needed)",
    "vllm": "vLLM by its own rule and under policies, alternating on one engine: throughput and host time",
    "vllm_serving": "the same as a server, driven by `vllm bench serve` at shares of its capacity",
    "vllm_simulated": "the runs of vllm_serving beside simulations with a profile of vLLM (no GPU needed)",
    "stale": "commits since each stored result was measured that changed the code (no GPU needed)",
    "page": "the page of measured speed of one card, and the comparison in the README (no GPU needed)",
}

MODULES = {
    **{name: f"reproduction.bench.{name}" for name in BENCHMARKS},
    "async": "reproduction.bench.async_loop",
    "vllm": "reproduction.bench.in_vllm.offline",
    "vllm_serving": "reproduction.bench.in_vllm.serving",
    "vllm_simulated": "reproduction.bench.in_vllm.simulated",
}


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    return run_benchmark(arguments, BENCHMARKS, MODULES, str(__doc__))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
