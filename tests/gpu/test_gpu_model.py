"""The fused model at full size, bfloat16: how a text is divided into iterations changes only rounding."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from gpu_models import CUDA, LARGE, make_batch

from cbatch.kv import KVSize
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.batch import Extents
from cbatch.runtime.fast.attention.choice import choose_attention
from cbatch.runtime.fast.fused_model import FusedModel
from cbatch.runtime.fast.quack_gemm import why_not_quack
from cbatch.runtime.gpu.ranks import finish
from cbatch.runtime.model import PagedModel
from cbatch.runtime.weights import load_model

BLOCK_SIZE, WIDTH, LENGTH = 128, 4, 512
TOLERANCE = 0.1
"""Largest error of a log-probability. Rounding a logit near 4 to bfloat16 changes it by 0.016; 32 layers add up to a few times that."""


@pytest.fixture(scope="module")
def fused() -> Iterator[FusedModel]:
    yield make_model(LARGE)
    torch.cuda.empty_cache()


def make_model(spec) -> FusedModel:  # type: ignore[no-untyped-def]
    cache = PagedCache(spec, KVSize(2 * WIDTH, BLOCK_SIZE), CUDA)
    attention = choose_attention(spec, BLOCK_SIZE, CUDA).attention
    return FusedModel(load_model(spec, CUDA), spec, cache, attention, max_rows=4, max_positions=LENGTH)


def log_probabilities(model: FusedModel, text: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Log-probabilities of the tokens that follow each cut; the text is computed in pieces that end at the cuts."""
    table = torch.randperm(2 * WIDTH)[:WIDTH]
    found = []
    for begin, end in zip([0, *cuts[:-1]], cuts, strict=True):
        batch = make_batch([(end - begin, end)], BLOCK_SIZE, WIDTH)
        batch.block_tables.copy_(table[None])
        positions = torch.arange(begin, end)
        batch.kv_indices.copy_(table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
        logits = model(text[begin:end], batch, Extents(end - begin, WIDTH * BLOCK_SIZE, 1))
        found.append(logits[0].log_softmax(-1)[text[end]])
    return torch.stack(found)


def test_log_probabilities_do_not_depend_on_the_chunks(fused: FusedModel) -> None:
    text = torch.randint(0, LARGE.vocab_size, (LENGTH,), device=CUDA, dtype=torch.int32)
    ends = list(range(256, LENGTH))
    one_by_one = log_probabilities(fused, text, ends)
    in_chunks = log_probabilities(fused, text, [64, 192, *ends[:1], 300, 301, 460, 500, 511])[2:]
    assert (in_chunks - one_by_one[[0, 44, 45, 204, 244, 255]]).abs().max() < TOLERANCE


@pytest.mark.parametrize("quack", [False, True])
def test_the_fused_model_is_the_model_of_transformers(quack: bool) -> None:
    """quack multiplies gates and ups of 501 tokens. The second iteration reads what the last layer of the first one stored."""
    spec = replace(LARGE, num_layers=4)
    if quack and (reason := why_not_quack(spec, CUDA)):
        pytest.skip(reason)
    weights = load_model(spec, CUDA)
    attention = choose_attention(spec, BLOCK_SIZE, CUDA).attention
    caches = [PagedCache(spec, KVSize(3 * WIDTH, BLOCK_SIZE), CUDA) for _ in range(2)]
    plain = PagedModel(weights, caches[0], attention)
    fused = FusedModel(weights, spec, caches[1], attention, max_rows=4, max_positions=LENGTH, quack=quack)
    for rows in ([(200, 200), (300, 300), (1, 1)], [(1, 201), (40, 340), (1, 2)], [(1, 202), (1, 341), (1, 3)]):
        torch.manual_seed(0)  # the blocks of the iteration before
        batch = make_batch(rows, BLOCK_SIZE, WIDTH)
        lengths, contexts = zip(*rows, strict=True)
        tokens = torch.randint(0, spec.vocab_size, (sum(lengths),), device=CUDA, dtype=torch.int32)
        bounds = Extents(max(lengths), max(contexts), sum(length > 1 for length in lengths))
        with torch.inference_mode():
            expected = finish(plain.steps(tokens, batch, bounds)).float().log_softmax(-1)
            got = fused(tokens, batch, bounds).log_softmax(-1)
        assert (got - expected).abs().max() < TOLERANCE
