"""Each kernel against plain PyTorch in float64, on random inputs of every kind of size that occurs."""

import pytest
import torch
from gpu_models import CUDA, error, make_batch
from torch.nn.functional import rms_norm, silu

from cbatch.runtime.attention import PLACE_BITS, ReferenceAttention
from cbatch.runtime.batch import Extents
from cbatch.runtime.fast.argmax import argmax
from cbatch.runtime.fast.attention.decode import Chunks, SplitAttention
from cbatch.runtime.fast.attention.triton_chunks import TritonChunks
from cbatch.runtime.fast.attention.triton_decodes import Decodes
from cbatch.runtime.fast.fused_ops import add_norm, gate, rotate_and_store
from cbatch.runtime.fast.quack_gemm import quack_product
from cbatch.runtime.fast.small_batch_gemm import FEW_ROWS, small_batch_product, tiling_for

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest relative errors that rounding to the type explains."""

PROCESSORS = torch.cuda.get_device_properties(CUDA).multi_processor_count
DEPENDENT = torch.cuda.get_device_capability(CUDA) >= (9, 0)
ON_HOPPER = pytest.mark.skipif(
    torch.cuda.get_device_capability(CUDA)[0] != 9, reason="other GPUs take the library's products"
)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=CUDA).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [0, 1, 2, 4])
@pytest.mark.parametrize("width", [64, 4096, 5120])
@pytest.mark.parametrize("rows", [1, 5])
def test_add_norm(dtype: torch.dtype, splits: int, width: int, rows: int) -> None:
    parts = random(splits, rows, width) if splits else None
    residual, weight = random(rows, width, dtype=dtype), random(width, dtype=dtype)
    total = residual.double() + (0 if parts is None else parts.double().sum(0))
    out = add_norm(parts, residual, weight, 1e-5, dependent=DEPENDENT)
    assert error(out, rms_norm(total, (width,), weight.double(), 1e-5)) < DTYPES[dtype]
    assert error(residual, total) < DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(dtype: torch.dtype) -> None:
    both = random(7, 2 * 13824, dtype=dtype)
    gates, ups = both.double().chunk(2, dim=1)
    assert error(gate(both, dependent=DEPENDENT), silu(gates) * ups) < DTYPES[dtype]


@pytest.mark.parametrize("kind", ["plain", "bias", "norms"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (40, 40, 128), (4, 2, 16), (6, 1, 64)])
def test_rotate_and_store(heads: int, kv_heads: int, dim: int, kind: str) -> None:
    """Some tokens are written to one of two layers of a larger cache, too."""
    num_tokens, splits = 9, 2
    width = (heads + 2 * kv_heads) * dim
    parts, positions = (
        random(splits, num_tokens, width),
        torch.randint(0, 50, (num_tokens,), device=CUDA, dtype=torch.int32),
    )
    slots = torch.randperm(64, device=CUDA)[:num_tokens].int()
    angles = random(50, dim // 2)
    rotations = torch.stack([angles.cos(), angles.sin()], dim=1).contiguous()
    bias = random(width) if kind == "bias" else None
    norms = (random(dim), random(dim)) if kind == "norms" else None
    keys, values = random(4, 16, kv_heads, dim), random(4, 16, kv_heads, dim)
    there = torch.full((2, 2, 128, kv_heads, dim), torch.nan, device=CUDA)  # keys and values, layers
    addresses = torch.zeros(32, 3, dtype=torch.int64, device=CUDA)
    addresses[2] = torch.tensor([there[0].data_ptr(), there[1].data_ptr(), there.stride(1)])
    places, is_sent = torch.randperm(128, device=CUDA)[:num_tokens].int(), torch.arange(9, device=CUDA) % 3 > 0
    query = rotate_and_store(
        parts,
        rotations,
        positions,
        slots,
        keys,
        values,
        heads,
        sent=(places + (2 << PLACE_BITS)) * is_sent,
        addresses=addresses,
        layer=1,
        bias=bias,
        norms=norms,
        epsilon=1e-6,
        dependent=DEPENDENT,
    )

    summed = (parts.double().sum(0) + (0 if bias is None else bias)).view(num_tokens, -1, dim)
    q, k, v = summed.split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = (rms_norm(part, (dim,), weight.double(), 1e-6) for part, weight in zip((q, k), norms, strict=True))
    cosine, sine = (part.double()[positions.long()][:, None] for part in (angles.cos(), angles.sin()))

    def rotate(part: torch.Tensor) -> torch.Tensor:
        low, high = part.chunk(2, dim=-1)
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)

    written = [cache.view(64, kv_heads, dim)[slots.long()] for cache in (keys, values)]
    for got, expected in zip((query, *written), (rotate(q), rotate(k), v), strict=True):
        assert error(got, expected) < 1e-5
    for part, expected in zip(there, written, strict=True):
        assert torch.equal(part[1][places[is_sent].long()], expected[is_sent])
    assert int(there.isnan().sum()) == there.numel() - 2 * int(is_sent.sum()) * kv_heads * dim


@ON_HOPPER
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 32, 64, 65, 128])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (4096, 4096), (4096, 14336), (5120, 5120), (4096, 11008)]
)
def test_small_batch_product(rows: int, outputs: int, inputs: int) -> None:
    x, weight = random(rows, inputs, dtype=torch.bfloat16), random(outputs, inputs, dtype=torch.bfloat16)
    tiling = tiling_for(outputs, inputs, PROCESSORS, gated=False, wide=rows > FEW_ROWS)
    assert tiling is not None
    out = small_batch_product(x, weight, tiling)
    assert error(out.double().sum(0), x.double() @ weight.double().T) < 1e-5


@ON_HOPPER
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [
        *((rows, *sizes) for sizes in [(14336, 4096), (11008, 4096), (13824, 5120)] for rows in (1, 32, 64, 100)),
        *((rows, 28672, 1024) for rows in (1, 64)),
    ],
)
def test_gated_small_batch_product(rows: int, outputs: int, inputs: int) -> None:
    x, weight = random(rows, inputs, dtype=torch.bfloat16), 0.02 * random(2 * outputs, inputs, dtype=torch.bfloat16)
    tiling = tiling_for(outputs, inputs, PROCESSORS, gated=True, wide=rows > FEW_ROWS)
    assert tiling is not None
    out = small_batch_product(x, weight, tiling, gated=True)
    gates, ups = (x.double() @ weight.double().T).chunk(2, dim=1)
    assert error(out[0], silu(gates) * ups) < 1e-2


@ON_HOPPER
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "gated"),
    [
        *((rows, 28672, 4096, True) for rows in (501, 512, 640, 768, 1000, 1024)),
        (256, 27648, 5120, True),
        (1024, 6144, 4096, False),
        (1010, 6144, 4096, False),
        (256, 15360, 5120, False),
    ],
)
def test_quack_product(rows: int, outputs: int, inputs: int, gated: bool) -> None:
    pytest.importorskip("quack")
    x, weight = random(rows, inputs, dtype=torch.bfloat16), 0.02 * random(outputs, inputs, dtype=torch.bfloat16)
    out = quack_product(x, weight, PROCESSORS, gated=gated)
    assert out is not None
    expected = x.double() @ weight.double().T
    if gated:
        gates, ups = expected.chunk(2, dim=1)
        expected = silu(gates) * ups
    assert error(out, expected) < 1e-2


@pytest.mark.parametrize("rows", [1, 33, 128])
@pytest.mark.parametrize("vocabulary", [96, 32000, 128256])
def test_argmax(rows: int, vocabulary: int) -> None:
    logits = random(rows, vocabulary)
    tokens = torch.empty(rows, dtype=torch.int32, device=CUDA)
    argmax(logits, tokens)
    assert torch.equal(tokens.long(), logits.argmax(-1))
    tied = torch.randint(0, 3, (rows, vocabulary), device=CUDA).float()
    argmax(tied, tokens)
    assert torch.equal(tokens.long(), (tied == 2).int().argmax(-1))


def chunk_attentions() -> list[Chunks]:
    found: list[Chunks] = [TritonChunks(dependent=DEPENDENT)]
    try:
        from cbatch.runtime.fast.attention.flash4 import Flash4Chunks

        found.append(Flash4Chunks())
    except ImportError:
        pass
    return found


ROWS = {
    "decodes": [(1, 1), (1, 130), (1, 700), (1, 64), (1, 1000)],
    "one long decode": [(1, 1000)],
    "mixed": [(1, 130), (1, 7), (96, 96), (33, 1000), (1, 1000), (200, 513)],
    "chunks": [(2, 2), (128, 256), (77, 900)],
    "padding": [(1, 300), (40, 40), (1, 1), (0, 0), (0, 0)],
    "one very long decode": [(1, 9000)],
    "many": [(1, 1 + 37 * row % 1000) for row in range(150)],
    "even decodes": [(1, 640)] * 32,
    "one decode among padding": [(0, 0), (1, 1024), *[(0, 0)] * 126],
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [
        (32, 8, 128, 128),
        (8, 8, 64, 128),
        (16, 16, 64, 128),
        (32, 16, 128, 128),
        (40, 40, 128, 128),
        (12, 4, 128, 128),
        (32, 8, 128, 16),
        (40, 40, 128, 32),
    ],
)
@pytest.mark.parametrize("chunks", chunk_attentions(), ids=lambda attention: attention.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(
    kind: str, heads: int, kv_heads: int, dim: int, block_size: int, chunks: Chunks, dtype: torch.dtype
) -> None:
    """All requests share the first four blocks."""
    if dtype is torch.float32 and chunks.name != "triton":
        pytest.skip("the library computes 16-bit floats")
    rows = ROWS[kind]
    width = max(8, -(-max(context for _, context in rows) // block_size))
    batch = make_batch(rows, block_size, width)
    batch.block_tables[:, :4] = batch.block_tables[0, :4].clone()
    query = random(sum(queries for queries, _ in rows), heads, dim, dtype=dtype)
    keys, values = random(2, len(rows) * width + 1, block_size, kv_heads, dim, dtype=dtype)
    longest = max(queries for queries, _ in rows)
    max_chunks = min(sum(queries > 1 for queries, _ in rows) + 1, len(rows))  # one of them empty
    attention, bounds = SplitAttention(chunks, Decodes(CUDA)), Extents(longest, block_size * width, max_chunks)
    out, again = (attention(query, keys, values, batch, bounds, scaling=dim**-0.5) for _ in range(2))
    assert torch.equal(out, again)  # a call leaves nothing behind for the next one
    real = [row for row, (queries, _) in enumerate(rows) if queries]
    exact_query, exact_keys, exact_values = query.double(), keys.double(), values.double()
    expected = torch.empty_like(exact_query)
    for row in real:
        part = make_part(batch, row)
        begin, end = batch.query_starts[row : row + 2].tolist()
        expected[begin:end] = ReferenceAttention()(
            exact_query[begin:end], exact_keys, exact_values, part, Extents(0, 0, 0), scaling=dim**-0.5
        )
    assert error(out, expected) < DTYPES[dtype]


def make_part(batch, row: int):  # type: ignore[no-untyped-def]
    """One request of a batch."""
    part = make_batch([(1, 1)], 128, batch.block_tables.shape[1])
    part.block_tables.copy_(batch.block_tables[row : row + 1])
    part.context_lens.copy_(batch.context_lens[row : row + 1])
    part.query_starts.copy_(batch.query_starts[row : row + 2] - batch.query_starts[row])
    return part
