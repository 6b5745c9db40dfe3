"""Seconds, operations and bytes of an iteration by operation, under the names of the SARATHI paper (arXiv 2308.16369, section 2.1).

Operations and bytes are counted from the model's shape. Every value is moved once: a matrix product reads weights and
activations and writes its result; attention reads queries and the KV cache and writes its result, with the scores kept on
chip (FlashAttention, arXiv 2205.14135). Savings by caches and waste by tiles are not counted.
"""

from typing import NamedTuple

from cbatch import BatchShape, ModelSpec
from cbatch.model import DTYPE_BYTES
from cbatch.sim import ProfileCost

NAMES = {"qkv": "preproj", "attention": "attention", "o": "postproj", "gate_up": "ffn", "down": "ffn"}
"""The paper's name for each operation of `layer_op_counts`; both products of the feed-forward layer are ffn."""

ORDER = ("preproj", "attention", "postproj", "ffn", "others")


def seconds_by_operation(cost: ProfileCost, shape: BatchShape) -> dict[str, float]:
    """Device seconds of one iteration, in `ORDER`; "others" are norms, activations, residual sums, embedding and head.

    Profiles made from printed numbers hold the matrix products as one sum. It is split by weights, to which both
    arithmetic and bytes are proportional: preproj : postproj : ffn is 3 : 1 : 8 in the paper's models.
    """
    parts, shapes = cost.parts(shape), cost.spec.linear_shapes
    weights = {name: inputs * outputs for name, (inputs, outputs) in shapes.items()}
    seconds = dict.fromkeys(ORDER, 0.0)
    for name, weight in weights.items():
        seconds[NAMES[name]] += parts.linear * weight / sum(weights.values())
    return seconds | {"attention": parts.attention, "others": parts.other + parts.head + parts.communication}


def intensity_by_operation(cost: ProfileCost, shape: BatchShape) -> dict[str, float]:
    """Arithmetic intensity of each operation of one layer, FLOP/byte; the products of ffn count together."""
    flops, moved = dict.fromkeys(ORDER[:-1], 0.0), dict.fromkeys(ORDER[:-1], 0.0)
    for name, work in layer_op_counts(cost.spec, shape).items():
        flops[NAMES[name]] += work.flops
        moved[NAMES[name]] += work.bytes
    return {name: flops[name] / moved[name] for name in flops}


class OpCount(NamedTuple):
    """flops: floating-point operations, multiplication and addition counted as two. bytes: moved to and from memory."""

    flops: float
    bytes: float


def matmul(inputs: int, outputs: int, num_tokens: float, dtype_bytes: int) -> OpCount:
    """A matrix product: `num_tokens` rows of `inputs` values times weights of [inputs, outputs]."""
    moved = inputs * outputs + num_tokens * (inputs + outputs)
    return OpCount(2 * num_tokens * inputs * outputs, dtype_bytes * moved)


def attention(spec: ModelSpec, shape: BatchShape) -> OpCount:
    """Attention of one layer: causal within a chunk, and over the context before it."""
    scores = float(shape.decode_context)
    cached = scores  # tokens whose keys and values are read
    for tokens, context in shape.chunks:
        scores += tokens * (context + (tokens + 1) / 2)
        cached += context + tokens
    queries = shape.num_tokens - shape.num_padding
    values = 2 * cached * spec.num_kv_heads + 2 * queries * spec.num_heads  # keys, values; queries, results
    return OpCount(4 * scores * spec.num_heads * spec.head_dim, DTYPE_BYTES[spec.dtype] * spec.head_dim * values)


def layer_op_counts(spec: ModelSpec, shape: BatchShape) -> dict[str, OpCount]:
    """The operations of one layer by name: the products of `ModelSpec.linear_shapes`, and attention after the first.

    Norms, activations and residual sums are left out. The shape has at least one token.
    """
    dtype_bytes = DTYPE_BYTES[spec.dtype]
    shapes, tokens = spec.linear_shapes, shape.num_tokens
    products = {name: matmul(inputs, outputs, tokens, dtype_bytes) for name, (inputs, outputs) in shapes.items()}
    return {"qkv": products.pop("qkv"), "attention": attention(spec, shape), **products}
