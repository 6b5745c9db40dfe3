"""`python -m reproduction.bench NAME [key=value ...]`: run one benchmark, print its table, write its results file."""

import sys
from collections.abc import Sequence

from experiments.bench.__main__ import Benchmark, run_benchmark
from reproduction import RESULTS
from reproduction.stored import BENCH

HERE = "reproduction.bench"
SERVE = "experiments.bench.serve"
OURS = {"folder": RESULTS, "command": BENCH}
ZIPF = "model=llama-13b batch=16 max_tokens=32768 workload=zipf workload.num_requests=192"
"""Requests of SARATHI's Zipf distribution (arXiv 2308.16369, 5.3)."""
WHOLE_OR_CHUNKS = "policy=orca;policy=sarathi chunk=256;policy=sarathi_serve chunk=512"

BENCHMARKS = {
    "pd": Benchmark(
        "throughput at P:D 14, by policy: the closed batch of SARATHI (arXiv 2308.16369, 5.1)",
        SERVE,
        presets={
            **OURS,
            "name": "pd",
            "settings": "model=llama-13b batch=18 max_tokens=18432 workload.num_requests=144",
            "policies": "policy=request_level;policy=orca;policy=sarathi chunk=128;policy=sarathi chunk=256;"
            "policy=sarathi chunk=384;policy=sarathi chunk=512;policy=sarathi chunk=auto",
        },
    ),
    "trace": Benchmark(
        "throughput on the first requests of a recorded trace, path=FILE, queued at once, by policy",
        SERVE,
        presets={
            **OURS,
            "name": "trace-128",
            "settings": "batch=128 max_tokens=16384 workload=azure_conv workload.queued=true workload.num_requests=512",
            "policies": "policy=sarathi_serve chunk=1024;policy=longest_first chunk=1024;"
            "policy=longest_first policy.per_prompt_token=true chunk=1024;policy=prefill_first;policy=orca",
        },
    ),
    "pipeline": Benchmark(
        "throughput and bubbles of two pipeline stages, by policy; simulated, settings='backend=sim ...'",
        SERVE,
        needs_gpu=False,
        presets={
            **OURS,
            "name": "pipeline",
            "settings": f"backend.pipeline_stages=2 {ZIPF}",
            "policies": WHOLE_OR_CHUNKS,
        },
    ),
    "tensor": Benchmark(
        "throughput of two ranks of tensor parallelism, by policy; simulated, settings='backend=sim ...'",
        SERVE,
        needs_gpu=False,
        presets={
            **OURS,
            "name": "tensor",
            "settings": f"backend.tensor_parallel=2 {ZIPF.replace('batch=16', 'batch=32')}",
            "policies": "policy=sarathi_serve chunk=384",
        },
    ),
    "tensor_decode": Benchmark(
        "decode iterations of two ranks of tensor parallelism, of one batch of equal requests",
        SERVE,
        needs_gpu=False,
        presets={
            **OURS,
            "name": "tensor-decode",
            "settings": "backend.tensor_parallel=2 runtime.graphs=decode batch=32 workload.num_requests=32 "
            "workload.length=2304 workload.pd_ratio=0.125",
            "policies": "policy=prefill_first",
        },
    ),
    "coverage": Benchmark(
        "how often the intervals of capacities and means cover the truth, on queues that are known",
        f"{HERE}.coverage",
        needs_gpu=False,
    ),
    "vidur": Benchmark(
        "a whole simulated run as one process, on a workload that Vidur was timed on",
        f"{HERE}.process:vidur",
        needs_gpu=False,
    ),
    "million": Benchmark(
        "a million requests of ServeGen through one policy: time and memory of one process",
        f"{HERE}.process:million",
        needs_gpu=False,
    ),
    "attention": Benchmark(
        "attention of decodes against the bytes that it reads, for even and uneven contexts", f"{HERE}.attention"
    ),
    "tiles": Benchmark("time of an iteration against its tokens", f"{HERE}.tiles"),
    "async": Benchmark("the asynchronous loop against the synchronous one", f"{HERE}.async_loop"),
    "peers": Benchmark(
        "another engine, engine=vllm or transformers, on the work of async, graphs, pd and trace",
        f"{HERE}.peers.measure",
    ),
    "vllm": Benchmark(
        "vLLM by its own rule and under policies, alternating on one engine: throughput and host time",
        f"{HERE}.in_vllm.offline",
    ),
    "vllm_serving": Benchmark(
        "the same as a server, driven by `vllm bench serve` at shares of its capacity", f"{HERE}.in_vllm.serving"
    ),
    "vllm_simulated": Benchmark(
        "the runs of vllm_serving beside simulations with a profile of vLLM",
        f"{HERE}.in_vllm.simulated",
        needs_gpu=False,
    ),
    "page": Benchmark(
        "the page of measured speed of one card, and the comparison in the README", f"{HERE}.page", needs_gpu=False
    ),
    "graphs": Benchmark(
        "batches of 1 to 64: operation by operation, compiled, and with captured graphs", f"{HERE}.graphs"
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    return run_benchmark(arguments, BENCHMARKS, str(__doc__))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
