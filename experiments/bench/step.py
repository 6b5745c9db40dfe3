"""One decode iteration in one CUDA graph: its time, the time in which a copy reads its bytes, and the time of each kernel.

Without carry-over, packing and the engine: the device's part only, a lower bound for `async` and `graphs`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from cbatch import KVSize, ModelSpec
from cbatch.kv import blocks_for
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.batch import Bounds, Fields, Shape, device_views
from cbatch.runtime.fast.argmax import argmax
from cbatch.runtime.fast.attention.choice import choose_attention
from cbatch.runtime.fast.fused_model import FusedModel
from cbatch.runtime.weights import load_model
from experiments.config.command_line import Count
from experiments.config.presets import load_spec
from experiments.profile.kernel_trace import KernelTrace
from experiments.store.benchmark_file import spread, write

PAGE = 128
COPY_BANDWIDTH = 4.27e12
"""Bytes per second of a device-to-device copy on an H200, reads and writes counted; kernels that only read can be faster."""

Row = tuple[int, int]
"""Tokens that a request computes, and tokens of its context."""


def main(model: str = "llama-3.1-8b", batch: Count = 32, context: Count = 1280, folder: str = "results") -> None:
    """Measures, prints and writes step.json."""
    spec = load_spec(model)
    fused = build(spec, batch, context)
    inputs = device_batch([(1, context)] * batch, vocabulary=spec.vocab_size)
    tokens = torch.empty(batch, dtype=torch.int32, device="cuda")
    graph = capture(lambda: argmax(fused(inputs.token_ids, inputs, Bounds(1, context, 0)), tokens))
    times = spread(replay_times(graph, 50))
    bound = (spec.weight_bytes + batch * context * spec.kv_bytes_per_token) / COPY_BANDWIDTH * 1e3
    parts = breakdown(graph)
    hardware = torch.cuda.get_device_name()
    print(f"{spec.name}, {batch} decodes at context {context}, one graph on {hardware}")
    print(
        f"  {times['median']:.3f} ms ({times['min']:.3f} to {times['max']:.3f}); at the speed of a copy {bound:.3f} ms"
    )
    for name, (milliseconds, calls) in parts.items():
        print(f"  {milliseconds:7.3f} ms  {calls:4d} x  {name}")
    settings = {"unit": "ms per iteration", "model": spec.name, "batch": batch, "context": context}
    figures = {**settings, "time": times, "bytes_bound": bound, "kernels": parts}
    print(f"written: {write(f'step-{spec.name}-{batch}x{context}', hardware, figures, folder)}")


def build(spec: ModelSpec, num_rows: int, num_context: int) -> FusedModel:
    """Builds the model with a KV cache for these contexts."""
    device = torch.device("cuda")
    cache = PagedCache(spec, KVSize(num_rows * blocks_for(num_context, PAGE), PAGE), device)
    cache.keys.normal_()
    cache.values.normal_()
    attention = choose_attention(spec, PAGE, device).attention
    return FusedModel(load_model(spec, device), spec, cache, attention, max_rows=num_rows, max_positions=num_context)


def device_batch(rows: Sequence[Row], num_rows: int = 0, vocabulary: int = 1) -> Fields[torch.Tensor]:
    """Returns the inputs of an iteration: random tokens at the ends of the contexts, whose pages are scattered.

    num_rows: of the batch, if some are padding.
    """
    queries, contexts = torch.tensor(rows).T
    pages = -(-contexts // PAGE)
    shape = Shape(int(queries.sum()), max(num_rows, len(rows)), int(pages.max()))
    batch = device_views(torch.zeros(shape.size, dtype=torch.int32, device="cuda"), shape)
    batch.token_ids.random_(0, vocabulary)
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


def replay_times(graph: torch.cuda.CUDAGraph, repeats: int, warm_up: int = 5) -> list[float]:
    """Returns the milliseconds between the starts of consecutive replays."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for _ in range(warm_up):
        graph.replay()
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in pairwise(events)]


def breakdown(graph: torch.cuda.CUDAGraph) -> dict[str, tuple[float, int]]:
    """Returns (milliseconds, launches) of each kernel in a replay, longest first. Overlapping kernels count in full."""
    with KernelTrace() as trace:
        graph.replay()
    times: defaultdict[str, list[float]] = defaultdict(list)
    for kernel in trace.kernels:
        times[kernel.name[:100]].append((kernel.end - kernel.start) / 1e3)
    totals = {name: (sum(each), len(each)) for name, each in times.items()}
    return dict(sorted(totals.items(), key=lambda item: item[1][0], reverse=True)[:20])
