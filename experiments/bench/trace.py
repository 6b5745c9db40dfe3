"""The first requests of a recorded trace, queued at once, under each policy: prompt and output tokens per second."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cbatch import ConfigError, Limits, Policy
from cbatch.runtime.options import LastLayer, ProductsName
from experiments.bench.serving import chunked, compare, gpu_server, named_ways
from experiments.settings.command_line import Count, beginning_with
from experiments.settings.presets import load_spec
from experiments.settings.servers import equal_requests
from experiments.store.benchmark_file import write
from experiments.workloads import TraceReplay
from policies.chunking import Filling
from policies.longest_first import LongestFirst
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

BATCH = 128


def filling(policy: type, name: str, **settings: Any) -> dict[str, Callable[[], Policy]]:
    """Returns a policy whose chunks depend on how full the batch is, by its name and their sizes."""
    sizes = {f"{name}, filling with 1024 tokens, then {full}": Filling(1024, full) for full in (384, 512)}
    return {full_name: partial(policy, chunking, **settings) for full_name, chunking in sizes.items()}


POLICIES: dict[str, Callable[[], Policy]] = {
    **chunked(SarathiServe, "sarathi_serve", 512, 640, 768, 1024, 2048),
    **chunked(Sarathi, "sarathi", 512),
    **chunked(LongestFirst, "longest_first", 512, 640, 768, 1024),
    **chunked(LongestFirst, "longest per prompt token first", 1024, per_prompt_token=True),
    **filling(SarathiServe, "sarathi_serve"),
    **filling(LongestFirst, "longest_first"),
    **filling(LongestFirst, "longest per prompt token first", per_prompt_token=True),
    **chunked(LongestFirst, "longest_first", 1280, 2048),
    "prefill_first": PrefillFirst,
    "orca": Orca,
}


def main(
    path: str = "",
    model: str = "llama-3.1-8b",
    batch: Count = BATCH,
    requests: Count = 512,
    policies: str = "",
    products: ProductsName = "cublas",
    last_layer: LastLayer = "all",
    repeats: Count = 1,
    folder: str = "results",
) -> None:
    """Measures and prints; writes trace.json after each policy, or trace-<batch>.json for a batch other than 128; with
    products=quack and last_layer=sampled, ...-quack-sampled.json.

    `path` is the trace's file, `policies` beginnings of names separated by ";".
    """
    if not path:
        raise ConfigError("trace: give the trace's file, path=azure_llm_2023_conv.csv.gz")
    ways = named_ways(products, last_layer)
    chosen = {", ".join([name, *ways]): POLICIES[name] for name in beginning_with("policies", policies, POLICIES)}
    spec = load_spec(model)
    workload = TraceReplay(path=path, num_requests=requests, queued=True)
    lengths = workload.requests(None)
    longest = max(request.max_tokens for request in lengths)
    server = gpu_server(spec, Limits(batch, 16384, longest), products=products, last_layer=last_layer)
    server.serve(Orca(), equal_requests(batch, 64, 16, spec.vocab_size))
    figures: dict[str, Any] = {}
    name, number = Path(path).name, len(lengths)
    stamped = {"trace": name, "model": spec.name, "batch": batch, "requests": number, "figures": figures}
    print(f"{spec.name}, batch {batch}, {number} requests of {name}: tokens/s")
    for name, runs in compare(server, chosen, lambda: workload.requests(server.executor.vocabulary), repeats):
        run, rates = runs.served[0], runs.spread("tokens_per_second")
        figures[name] = {
            "tokens_per_second": rates,
            "seconds": runs.spread("seconds"),
            "iterations": run.iterations,
            "eager": runs.eager,
            "active_share": runs.spread("active_share"),
        }
        iterations = f"{run.iterations} iterations, {runs.eager} eager, device active {run.active_share:.2%}"
        print(f"  {name:28} {rates['median']:8.0f}  {run.seconds:6.2f} s, {iterations}", flush=True)
        file = "trace" if batch == BATCH else f"trace-{batch}"
        written = write("-".join([file, *ways]), torch.cuda.get_device_name(), stamped, folder)
    print(f"written: {written}")
