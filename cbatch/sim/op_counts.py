"""The work of one layer: floating-point operations and bytes moved of each operation, counted from the model's shape.

Every value is moved once: weights and activations of a product are read and its result is written; attention reads its
queries and the KV cache and writes its result, as kernels do that keep the scores on the chip (FlashAttention,
arXiv 2205.14135). What caches save and what tiles waste is not in it: this counts, it does not predict.
"""

from __future__ import annotations

from typing import NamedTuple

from cbatch.cost import BatchShape
from cbatch.model import DTYPE_BYTES, ModelSpec


class Work(NamedTuple):
    """flops: floating-point operations, a multiplication and an addition counted as two. bytes: moved to and from memory."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOP/byte: above the hardware's ratio of the two rates, arithmetic is the bound."""
        return self.flops / self.bytes


def product(inputs: int, outputs: int, num_tokens: float, dtype_bytes: int) -> Work:
    """A matrix product: `num_tokens` rows of `inputs` values times weights of [inputs, outputs]."""
    return Work(2 * num_tokens * inputs * outputs, dtype_bytes * (inputs * outputs + num_tokens * (inputs + outputs)))


def attention(spec: ModelSpec, shape: BatchShape) -> Work:
    """Attention of one layer: causal within a chunk, and over the context before it."""
    scores = float(shape.decode_context)
    cached = scores  # tokens whose keys and values are read
    for tokens, context in shape.chunks:
        scores += tokens * (context + (tokens + 1) / 2)
        cached += context + tokens
    queries = shape.num_tokens - shape.num_padding
    values = 2 * cached * spec.num_kv_heads + 2 * queries * spec.num_heads  # keys, values; queries, results
    return Work(4 * scores * spec.num_heads * spec.head_dim, DTYPE_BYTES[spec.dtype] * spec.head_dim * values)


def layer_work(spec: ModelSpec, shape: BatchShape) -> dict[str, Work]:
    """Each operation of one layer by name: the products of `ModelSpec.linear_shapes`, and attention after the first.

    Norms, activations and residual sums are left out.

    Args:
        shape: an iteration that computes at least one token.
    """
    dtype_bytes = DTYPE_BYTES[spec.dtype]
    products = {
        name: product(inputs, outputs, shape.num_tokens, dtype_bytes)
        for name, (inputs, outputs) in spec.linear_shapes.items()
    }
    return {"qkv": products.pop("qkv"), "attention": attention(spec, shape), **products}
