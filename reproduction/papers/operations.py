"""Seconds of an iteration by operation, under the names of the SARATHI paper (arXiv 2308.16369, section 2.1)."""

from cbatch import BatchShape
from cbatch.sim import ProfileCost
from cbatch.sim.op_counts import layer_op_counts

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
