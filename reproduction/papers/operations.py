"""Seconds, operations and bytes of an iteration by operation, under the names of the SARATHI paper (arXiv 2308.16369, section 2.1).

Operations and bytes are counted from the model's shape. Every value is moved once: a matrix product reads weights and
activations and writes its result; attention reads queries and the KV cache and writes its result, with the scores kept on
chip (FlashAttention, arXiv 2205.14135). Savings by caches and waste by tiles are not counted.
"""

from cbatch import BatchShape
from cbatch.model import DTYPE_BYTES
from cbatch.sim import ProfileCost
from cbatch.sim.attention import flops_per_score

NAMES = {"qkv": "preproj", "o": "postproj", "gate_up": "ffn", "down": "ffn"}
"""The paper's name for each operation of a layer; both products of the feed-forward layer are ffn."""

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
    """Arithmetic intensity of each operation of one layer, FLOP/byte; the products of ffn count together.

    A multiplication and an addition count as two operations.
    """
    spec, tokens = cost.spec, shape.num_tokens
    flops, values = dict.fromkeys(ORDER[:-1], 0.0), dict.fromkeys(ORDER[:-1], 0.0)
    for name, (inputs, outputs) in spec.linear_shapes.items():
        flops[NAMES[name]] += 2 * tokens * inputs * outputs
        values[NAMES[name]] += inputs * outputs + tokens * (inputs + outputs)
    queries = tokens - shape.num_padding
    flops["attention"] = shape.num_scores * flops_per_score(spec)
    # keys and values are read; queries are read, results are written
    values["attention"] = spec.head_dim * (2 * shape.num_kv_reads * spec.num_kv_heads + 2 * queries * spec.num_heads)
    return {name: flops[name] / (DTYPE_BYTES[spec.dtype] * values[name]) for name in flops}
