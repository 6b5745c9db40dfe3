"""The reference attention against attention computed query by query."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cbatch.runtime.attention import ReferenceAttention
from cbatch.runtime.batch import Extents, Fields
from cbatch.runtime.fast.attention.rows import chunk_rows

HEAD_DIM = 8
SCALING = 0.3


def paged_batch(lengths: list[tuple[int, int]], block_size: int, kv_heads: int, random: np.random.Generator) -> tuple:
    """Rows of (queries, context) over blocks in random order; NaN outside all contexts."""
    rows, needed = len(lengths), [-(-context // block_size) for _, context in lengths]
    blocks = torch.from_numpy(random.permutation(sum(needed) + 3)).int()
    tables = torch.full((rows, max(needed) + 1), int(blocks[-1]), dtype=torch.int32)
    keys = torch.full((len(blocks) + 1, block_size, kv_heads, HEAD_DIM), torch.nan)
    values = keys.clone()
    contexts, taken = [], 0
    for row, (_, context) in enumerate(lengths):
        tables[row, : needed[row]] = blocks[taken : taken + needed[row]]
        taken += needed[row]
        pair = torch.from_numpy(random.normal(size=(2, context, kv_heads, HEAD_DIM))).float()
        indices = (
            tables[row, torch.arange(context) // block_size].long() * block_size + torch.arange(context) % block_size
        )
        keys.flatten(0, 1)[indices], values.flatten(0, 1)[indices] = pair
        contexts.append(pair)
    starts = torch.tensor([0, *np.cumsum([queries for queries, _ in lengths])], dtype=torch.int32)
    fields = dict.fromkeys(Fields.__dataclass_fields__, torch.zeros(0))
    lens = torch.tensor([context for _, context in lengths]).int()
    batch = Fields(**{**fields, "query_starts": starts, "context_lens": lens, "block_tables": tables})
    return keys, values, batch, contexts


def attend_alone(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query [heads, head dim] against the keys that it sees, [keys, kv heads, head dim]."""
    group = query.shape[0] // keys.shape[1]
    heads = []
    for head, vector in enumerate(query):
        weights = (keys[:, head // group] @ vector * SCALING).softmax(0)
        heads.append(weights @ values[:, head // group])
    return torch.stack(heads)


@st.composite
def row_lengths(draw: st.DrawFn) -> list[tuple[int, int]]:
    contexts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    return [(draw(st.sampled_from((1, context)) | st.integers(0, context)), context) for context in contexts]


@pytest.mark.long
@given(lengths=row_lengths(), block_size=st.sampled_from((1, 3, 16)), heads=st.sampled_from(((4, 4), (4, 2), (6, 1))))
def test_it_is_causal_attention_of_the_last_queries(
    lengths: list[tuple[int, int]], block_size: int, heads: tuple[int, int]
) -> None:
    """Decodes, chunks and whole prompts in one batch; what lies beyond a context is NaN and must not be read."""
    random = np.random.default_rng(1)
    num_heads, kv_heads = heads
    keys, values, batch, contexts = paged_batch(lengths, block_size, kv_heads, random)
    query = torch.from_numpy(random.normal(size=(sum(queries for queries, _ in lengths), num_heads, HEAD_DIM))).float()
    output = ReferenceAttention()(query, keys, values, batch, Extents(99, 99, 99), scaling=SCALING)
    assert output.shape == query.shape
    place = 0
    for (queries, context), (row_keys, row_values) in zip(lengths, contexts, strict=True):
        for seen in range(context - queries + 1, context + 1):
            expected = attend_alone(query[place], row_keys[:seen], row_values[:seen])
            torch.testing.assert_close(output[place], expected, rtol=1e-5, atol=1e-5)
            place += 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half_precision(dtype: torch.dtype) -> None:
    keys, values, batch, _ = paged_batch([(1, 9), (4, 7)], 4, 2, np.random.default_rng(2))
    query = torch.ones(5, 4, HEAD_DIM, dtype=dtype)
    output = ReferenceAttention()(query, keys.to(dtype), values.to(dtype), batch, Extents(4, 9, 1), scaling=SCALING)
    assert output.dtype is dtype and not output.isnan().any()


@given(lengths=row_lengths(), spare=st.integers(0, 2))
def test_chunks_are_picked_out_of_all_rows(lengths: list[tuple[int, int]], spare: int) -> None:
    _, _, batch, _ = paged_batch(lengths, 4, 2, np.random.default_rng(4))
    chunks = sorted((queries for queries, _ in lengths if queries > 1), reverse=True)
    bounds = Extents(40, 40, min(len(chunks) + spare, len(lengths)))
    rows = chunk_rows(batch, bounds)
    assert rows.query_lens.tolist() == chunks + [0] * (bounds.max_chunks - len(chunks))
    assert len(rows.starts) == bounds.max_chunks + 1
    starts, ends = batch.query_starts[:-1].tolist(), batch.query_starts[1:].tolist()
    for place, queries in enumerate(chunks):
        row = next(
            row
            for row, (begin, end) in enumerate(zip(starts, ends, strict=True))
            if begin == rows.starts[place] and end - begin == queries
        )
        assert rows.context_lens[place] == batch.context_lens[row]
        assert rows.block_tables[place].equal(batch.block_tables[row])


def test_chunks_see_the_mask_of_sarathis_fig_6() -> None:
    """A chunk's queries see all tokens before the chunk and, within it, those up to themselves. Values name their positions."""
    seen = []
    for begin, end in ((0, 3), (3, 6), (6, HEAD_DIM)):
        keys, values, batch, _ = paged_batch([(end - begin, end)], 3, 1, np.random.default_rng(0))
        places = torch.arange(end)
        indices = batch.block_tables[0, places // 3].long() * 3 + places % 3
        values.flatten(0, 1)[indices, 0] = torch.eye(HEAD_DIM)[:end]
        output = ReferenceAttention()(
            torch.ones(end - begin, 1, HEAD_DIM), keys, values, batch, Extents(3, HEAD_DIM, 1), scaling=SCALING
        )
        seen.append(output[:, 0] > 0)
    assert torch.equal(torch.cat(seen), torch.ones(HEAD_DIM, HEAD_DIM).tril().bool())
