"""Attention on made-up inputs: how fast decodes read their contexts beside a copy on the device, for several distributions over the requests.

A decode takes about as long as reading its keys and values. One long context, many uneven ones and a few beside a chunk are the cases in
which kernels leave processors idle. Each case runs in a CUDA graph, as in serving.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from cbatch import KVSize, ModelSpec
from cbatch.kv import blocks_for
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.batch import Bounds, Fields, Shape, device_views
from cbatch.runtime.fast.attention.choice import choose_attention
from experiments.settings.command_line import Count
from experiments.settings.presets import load_spec
from experiments.store.provenance import spread, write_benchmark
from reproduction import BENCH, RESULTS

PAGE = 128

WARM_UP = 5
"""Replays before the timed ones."""

Row = tuple[int, int]
"""Tokens that a request computes, and tokens of its context."""

COPY_BANDWIDTH = 4.27e12
"""Bytes per second of a device-to-device copy on an H200, reads and writes counted; kernels that only read can be faster."""

NUM_LAYERS = 8
"""Layers of attention measured in turn, so that a layer's keys and values have left the device's cache."""


def main(model: str = "llama-3.1-8b", batch: Count = 128, repeats: Count = 20, folder: str = RESULTS) -> None:
    """Measures, prints and writes attention-<model>.json."""
    spec = load_spec(model)
    hardware = torch.cuda.get_device_name()
    print(f"{spec.name}, attention of one layer, beside a chunk in graphs for {batch} requests, on {hardware}")
    figures = {}
    for name, rows in cases(batch).items():
        chunks = [row for row in rows if row[0] > 1]
        context = sum(tokens for queries, tokens in rows if queries == 1)
        bound = context * spec.kv_bytes_per_token // spec.num_layers / COPY_BANDWIDTH * 1e6
        times = _times(spec, rows, batch, repeats)
        alone = _times(spec, chunks, batch, repeats) if chunks else None
        figures[name] = {"rows": rows, "time": times, "chunks_alone": alone, "bytes_bound": bound}
        less = f", {times['median'] - alone['median']:7.1f} us less its chunk alone" if alone else ""
        print(f"  {name:32s} {times['median']:8.1f} us; at the speed of a copy {bound:7.1f} us{less}", flush=True)
    content = {"unit": "us per layer", "model": spec.name, "batch": batch, "figures": figures}
    print(f"written: {write_benchmark(f'attention-{spec.name}', hardware, content, folder, BENCH)}")


def cases(batch: int) -> dict[str, list[Row]]:
    """Returns the iterations to measure, without rows of padding."""
    uneven = np.random.default_rng(0).lognormal(6.8, 0.9, batch).clip(16, 8192).astype(int).tolist()
    return {
        "one decode of 1,024": [(1, 1024)],
        "one decode of 32,768": [(1, 32768)],
        "a few decodes of 2,048": [(1, 2048)] * 4,
        "32 decodes of 4,096": [(1, 4096)] * 32,
        f"{batch} decodes, even": [(1, 1365)] * batch,
        f"{batch} decodes, uneven": [(1, context) for context in uneven],
        "one of 32,768 beside a chunk": [(1, 32768), (512, 512)],
        "three beside a chunk": [*[(1, 1024)] * 3, (253, 253)],
        "uneven beside a chunk": [*((1, context) for context in uneven[1:]), (512, 1024)],
    }


def _times(spec: ModelSpec, rows: Sequence[Row], num_rows: int, repeats: int) -> dict[str, float]:
    """Returns the microseconds of a layer's attention, over layers with their own keys and values.

    num_rows: requests for which a graph with a chunk is captured; a graph of decodes only is captured for `rows`.
    """
    device, chunks = torch.device("cuda"), [tokens for tokens, _ in rows if tokens > 1]
    batch = device_batch(rows, num_rows if chunks else 0)
    num_pages = sum(blocks_for(context, PAGE) for _, context in rows)
    cache = PagedCache(replace(spec, num_layers=NUM_LAYERS), KVSize(num_pages, PAGE), device)
    cache.keys.normal_()
    cache.values.normal_()
    kernel = choose_attention(spec, PAGE, device).attention
    query = torch.randn((len(batch.token_ids), spec.num_heads, spec.head_dim), device=device).to(cache.keys.dtype)
    bounds = Bounds(max(chunks, default=1), batch.block_tables.shape[1] * PAGE, max(1, len(chunks)))

    def run() -> torch.Tensor:
        iteration = replace(batch)  # what the kernels derive from a batch is computed inside the graph
        for layer in range(NUM_LAYERS):
            out = kernel(query, *cache.layer(layer), iteration, bounds, scaling=spec.head_dim**-0.5)
        return out

    return spread([1e3 * time / NUM_LAYERS for time in replay_times(capture(run), repeats)])


def device_batch(rows: Sequence[Row], num_rows: int) -> Fields[torch.Tensor]:
    """Returns the inputs of an iteration at the ends of the contexts, whose pages are scattered.

    num_rows: of the batch, if some are padding.
    """
    queries, contexts = torch.tensor(rows).T
    pages = -(-contexts // PAGE)
    shape = Shape(int(queries.sum()), max(num_rows, len(rows)), int(pages.max()))
    batch = device_views(torch.zeros(shape.size, dtype=torch.int32, device="cuda"), shape)
    batch.query_starts[1:] = shape.num_tokens
    batch.query_starts[1 : len(rows) + 1] = queries.cumsum(0)
    batch.context_lens[: len(rows)] = contexts
    tables = torch.randperm(int(pages.sum()), dtype=torch.int32).split(pages.tolist())
    positions = [torch.arange(context - tokens, context) for tokens, context in rows]
    for row, table in enumerate(tables):
        batch.block_tables[row, : len(table)] = table
    indices = [table[at // PAGE] * PAGE + at % PAGE for table, at in zip(tables, positions, strict=True)]
    batch.positions.copy_(torch.cat(positions))
    batch.kv_indices.copy_(torch.cat(indices))
    return batch


def capture(run: Callable[[], torch.Tensor]) -> torch.cuda.CUDAGraph:
    """Warms up, then captures."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    torch.cuda.synchronize()
    return graph


def replay_times(graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
    """Returns the milliseconds between the starts of consecutive replays."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for _ in range(WARM_UP):
        graph.replay()
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in pairwise(events)]
