"""Single iterations for benchmarks of the device's part alone: a model, inputs, a CUDA graph, and the times of its replays."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from cbatch import KVSize, ModelSpec
from cbatch.kv import blocks_for
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.batch import Fields, Shape, device_views
from cbatch.runtime.fast.attention.choice import choose_attention
from cbatch.runtime.fast.fused_model import FusedModel
from cbatch.runtime.weights import load_model

PAGE = 128

Row = tuple[int, int]
"""Tokens that a request computes, and tokens of its context."""


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
