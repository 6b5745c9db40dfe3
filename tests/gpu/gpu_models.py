"""Models for the tests on a GPU: tiny ones in float32 with the tokens of `generate`, and slices of a large one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import LONGEST_OUTPUT, LONGEST_PROMPT, paged_weights

from cbatch import Limits
from cbatch.model import ModelSpec
from cbatch.runtime.batch import Fields, Shape, device_views

CUDA = torch.device("cuda")
BLOCK_SIZE = 16
LIMITS = Limits(max_batch=4, max_tokens=256, max_request_tokens=LONGEST_PROMPT + LONGEST_OUTPUT, tile=32)
TINY_LLAMA = ModelSpec("gpu-llama", "llama", 2, 64, 4, 2, 16, 128, 96, 512, "float32")
TINY_QWEN3 = ModelSpec("gpu-qwen3", "qwen3", 2, 64, 4, 1, 32, 128, 96, 512, "float32", tied_embeddings=True)
TINY_NANOGPT = ModelSpec("gpu-nanogpt", "nanogpt", 2, 64, 4, 4, 16, 256, 96, 512, "float32")
LARGE = ModelSpec("llama-3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, rope_theta=500000.0)
SLICE = replace(LARGE, name="slice", num_layers=6, vocab_size=32000)
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


def with_same_weights(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The spec of a checkpoint that holds the weights which the CPU's tests use."""
    path = folder / spec.name
    if not path.exists():
        paged_weights(spec).save_pretrained(path)
    return replace(spec, path=str(path))


def make_batch(rows: list[tuple[int, int]], block_size: int, table_width: int) -> Fields[torch.Tensor]:
    """Inputs of an iteration on the GPU, blocks scattered.

    rows: (queries, context) of each request; a request without queries is padding.
    """
    num_queries = torch.tensor([queries for queries, _ in rows])
    num_tokens = int(num_queries.sum())
    shape = Shape(num_tokens, len(rows), table_width)
    batch = device_views(torch.zeros(shape.size, dtype=torch.int32, device=CUDA), shape)
    batch.block_tables.copy_(torch.randperm(len(rows) * table_width).reshape(len(rows), table_width))
    batch.query_starts.copy_(torch.cat([torch.zeros(1, dtype=torch.int64), num_queries.cumsum(0)]))
    batch.context_lens.copy_(torch.tensor([context for _, context in rows]))
    positions = [torch.arange(context - queries, context) for queries, context in rows]
    owners = torch.arange(len(rows)).repeat_interleave(num_queries)
    batch.positions.copy_(torch.cat(positions))
    blocks = batch.block_tables.cpu()[owners, torch.cat(positions) // block_size]
    batch.kv_indices.copy_(blocks * block_size + torch.cat(positions) % block_size)
    return batch


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the norm, computed in float64."""
    difference = got.double() - expected.double()
    assert not got.isnan().any(), "not a number"
    return float(difference.norm() / expected.double().norm())
