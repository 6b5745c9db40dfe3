"""Throughput against the ratio of prompt to output tokens: the closed batch of SARATHI (arXiv 2308.16369, 5.1)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from cbatch import Limits, Policy, Request, Server
from cbatch.runtime.options import LastLayer, ProductsName
from experiments.bench.serving import chunked, compare, gpu_server, named_ways
from experiments.settings.command_line import Count, beginning_with
from experiments.settings.presets import load_spec
from experiments.store.benchmark_file import write
from experiments.workloads import ClosedBatch
from policies.chunking import Fixed, PDAware
from policies.orca import Orca
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi

POLICIES: dict[str, Callable[[], Policy]] = {
    "request_level": RequestLevel,
    "orca": Orca,
    **chunked(Sarathi, "sarathi", 128, 256, 384, 512),
    "sarathi, chunk found": lambda: Sarathi(PDAware()),
    **{f"sarathi, {chunk} + decodes": partial(Sarathi, Fixed(chunk)) for chunk in (128, 256, 512)},
}


def main(
    model: str = "llama-13b",
    batch: Count = 18,
    length: Count = 1024,
    ratios: tuple[float, ...] = (2, 5, 14, 28, 50),
    requests: Count = 144,
    policies: str = "",
    products: ProductsName = "cublas",
    last_layer: LastLayer = "all",
    repeats: Count = 1,
    folder: str = "results",
) -> None:
    """Measures and prints; writes pd.json after each policy, or pd-quack-sampled.json with products=quack and last_layer=sampled.

    `ratios` are P:D, `policies` beginnings of names separated by ";".
    """
    ways = named_ways(products, last_layer)
    chosen = {", ".join([name, *ways]): POLICIES[name] for name in beginning_with("policies", policies, POLICIES)}
    spec = load_spec(model)
    server = gpu_server(spec, Limits(batch, batch * length, length), products=products, last_layer=last_layer)
    figures: dict[str, Any] = {}
    stamped = {"model": spec.name, "batch": batch, "length": length, "requests": requests, "figures": figures}
    iteration = server.executor.iteration
    for ratio in ratios:
        requests_of = partial(_requests, server, length, ratio, batch)
        print(f"{spec.name}, batch {batch}, {length} tokens per request, P:D {ratio:g}: tokens/s")
        found = figures[f"{ratio:g}"] = {}
        for name, runs in compare(server, chosen, partial(requests_of, requests), repeats, partial(requests_of, 2)):
            run, rates = runs.served[0], runs.spread("tokens_per_second")
            found[name] = {"tokens_per_second": rates, "iterations": run.iterations}
            if isinstance(runs.policy, Sarathi) and isinstance(runs.policy.chunking, PDAware):
                found[name]["chunk"] = runs.policy.chunking.total
            speed = f"{rates['median']:8.0f}  {run.milliseconds:7.3f} ms/iteration"
            print(f"  {name:24} {speed}, {run.iterations} iterations", flush=True)
            counts = {"replayed": iteration.num_replayed, "eager": iteration.num_eager}
            path = write("-".join(["pd", *ways]), torch.cuda.get_device_name(), {**stamped, **counts}, folder)
    print(f"written: {path}")


def _requests(server: Server[Any], length: int, ratio: float, batch: int, number: int) -> Sequence[Request]:
    workload = ClosedBatch(length=length, pd_ratio=ratio, batch=batch, num_requests=number)
    return workload.requests(server.executor.vocabulary)
