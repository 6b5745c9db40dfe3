"""What CUDA graphs and `torch.compile` bring, from a single request to a batch of 64.

Six ways to compute the same iterations: `transformers`' modules as they are, the same compiled by `torch.compile`, and
the fused model; each launched operation by operation, and as captured graphs; and the four of `static_cache`, for one request. The setting is that of Fireworks AI's
post on CUDA graphs, LLaMA-2-7B at batch 1, and larger batches. Before a way runs at full speed it costs time to build
(weights and captures) and to serve a first request, which compiles whatever is compiled on first use.

Per batch, a window of decodes in the middle of the output is measured, so that slow ways need not generate all of it.
The smallest batch is also served whole, prompt included, as engines are compared: `output_tokens_per_second`.
"""

import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from cbatch import Limits, ModelSpec
from cbatch.runtime.options import Options
from experiments.bench import figures_of
from experiments.settings.backends import Cuda
from experiments.settings.command_line import Count
from experiments.setup.presets import load_spec
from experiments.setup.servers import equal_requests, real_server, release_memory
from experiments.store.provenance import spread, write_benchmark
from policies.orca import Orca
from reproduction import BENCH, RESULTS
from reproduction.bench import static_cache
from reproduction.bench.graph_memory import graph_memory
from reproduction.bench.static_cache import StaticWay
from reproduction.selection import beginning_with

WARM_UP_TOKENS = 16
SETTLE_TOKENS = 8
"""Generated before the window: the prompts' iteration, and what a new batch size compiles."""
STRETCHES = 4
"""Parts of the window that are timed one by one."""

WAYS: dict[str, Options | StaticWay] = {
    "fused, graphs": Options(),
    "fused, eager": Options(graphs="off"),
    "transformers, graphs": Options(graphs="decode", fused=False),
    "transformers, eager": Options(graphs="off", fused=False),
    "torch.compile": Options(graphs="off", fused=False, compiled=True),
    "torch.compile, graphs": Options(graphs="decode", fused=False, compiled=True),
    **static_cache.WAYS,
}


class Asked(NamedTuple):
    """Requests of `prompt` and `new` tokens, `batches` at a time, measured over a window of `window` decodes; `repeats` whole runs."""

    batches: tuple[int, ...]
    prompt: int
    new: int
    window: int
    repeats: int

    @property
    def context(self) -> int:
        """Returns the tokens of a request at which its window begins."""
        return self.prompt + (self.new - self.window) // 2

    @property
    def limits(self) -> Limits:
        longest = max(self.prompt + self.new, self.context + SETTLE_TOKENS + self.window)
        return Limits(max(self.batches), max(self.batches) * self.context, longest)


def main(
    model: str = "llama-2-7b",
    batches: tuple[Count, ...] = (1, 2, 4, 8, 16, 32, 64),
    prompt: Count = 32,
    new: Count = 512,
    window: Count = 64,
    repeats: Count = 3,
    ways: str = "",
    folder: str = RESULTS,
) -> None:
    """Measures, prints and writes graphs.json. repeats: whole runs of the smallest batch. ways: beginnings of names, separated by ";"."""
    spec, asked = load_spec(model), Asked(tuple(sorted(batches)), prompt, new, window, repeats)
    figures: dict[str, Any] = {}
    stamped = {"model": spec.name, **asked._asdict(), "figures": figures}
    print(f"{spec.name}, {prompt} prompt and {new} new tokens: tokens/s in the middle of the output")
    for name in beginning_with("ways", ways, WAYS):
        found = figures[name] = {}
        for batch in _measure(spec, WAYS[name], asked, found):
            print(f"  {name:22} batch {batch:3}  {found['by_batch'][str(batch)]['median']:8.1f} tokens/s", flush=True)
            path = write_benchmark("graphs", torch.cuda.get_device_name(), stamped, folder, BENCH)
        release_memory()
        shown = {key: value for key, value in found.items() if key.endswith("seconds")}
        print(f"  {name:22} {', '.join(f'{key} {value:.1f}' for key, value in shown.items())}", flush=True)
    print(f"written: {path}")


def _measure(spec: ModelSpec, way: Options | StaticWay, asked: Asked, found: dict[str, Any]) -> Iterator[int]:
    if isinstance(way, StaticWay):
        return static_cache.measure(spec, way, asked.prompt, asked.new, asked.window, asked.repeats, found)
    return measure(spec, way, asked, found)


def measure(spec: ModelSpec, way: Options, asked: Asked, found: dict[str, Any]) -> Iterator[int]:
    """Fills `found` with the cost of one way and its rates, batch by batch; yields each batch whose rate is known.

    Discards what earlier ways have compiled.
    """
    torch.compiler.reset()
    begin = time.perf_counter()
    server = real_server(Cuda(), spec, asked.limits, way)
    built = time.perf_counter()
    serve = partial(server.serve, Orca())
    serve(equal_requests(1, asked.prompt, WARM_UP_TOKENS, spec.vocab_size))
    report, least = server.executor.iteration.report, asked.batches[0]
    found |= {
        "build_seconds": built - begin,
        "capture_seconds": report.seconds,
        "warm_up_seconds": time.perf_counter() - built,
        "graphs": report.num_graphs,
        "graph_bytes": report.bytes,
    }
    whole = [serve(equal_requests(least, asked.prompt, asked.new, spec.vocab_size)) for _ in range(asked.repeats)]
    found["output_tokens_per_second"] = spread([least * asked.new / figures_of(run)["seconds"] for run in whole])
    found["by_batch"], stretch = {}, asked.window // STRETCHES
    for batch in asked.batches:
        record = serve(equal_requests(batch, asked.context, SETTLE_TOKENS + asked.window, spec.vocab_size))
        edges = [step.received_at for step in record.steps[-asked.window - 1 :]][::stretch]
        found["by_batch"][str(batch)] = spread([batch * stretch / (end - begin) for begin, end in pairwise(edges)])
        if report.num_graphs and batch == asked.batches[-1]:
            found["memory"] = graph_memory(server.executor.iteration, server.executor._slots)
        yield batch
    server.close()
