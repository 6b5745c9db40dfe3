"""Estimates the GPU memory that an executor takes, before it is allocated."""

from collections.abc import Sequence
from typing import NamedTuple

from cbatch.errors import CapacityError
from cbatch.limits import Limits
from cbatch.model import DTYPE_BYTES, Layers, ModelSpec

SPARE = 2e9
"""Bytes left to the driver, CUDA graphs, kernels and libraries' workspaces."""

GRAPH_SHARE = 0.5
"""Memory of the captured graphs, as a share of the activations of the largest iteration: their shapes are smaller."""


class Needs(NamedTuple):
    """Bytes by purpose. activations: those of an iteration at its limits, and the graphs beside it."""

    weights: int
    kv_cache: int
    activations: int


def needs(spec: ModelSpec, limits: Limits, kv_tokens: int, layers: Layers) -> Needs:
    """Bytes that a stage's weights, its part of the cache and its largest iteration take."""
    widths = spec.linear_shapes
    # residual, normalised and attended; q, k, v and query; gates and ups and their product
    values = 3 * spec.hidden_size + 2 * widths["qkv"][1] + widths["gate_up"][1] + spec.intermediate_size
    tokens = limits.max_tokens * values * DTYPE_BYTES[spec.dtype]
    logits = 3 * limits.max_batch * spec.vocab_size * 4 * layers.is_last
    arriving = 0 if layers.is_first else (limits.num_stages + 1) * limits.max_tokens * spec.hidden_size * 4
    activations = round(tokens * (1 + GRAPH_SHARE)) + logits + arriving
    return Needs(layers.weight_bytes(spec), kv_tokens * _kv_bytes(spec, layers), activations)


def check_memory(
    spec: ModelSpec, limits: Limits, kv_tokens: int, layers: Sequence[Layers], free: Sequence[int]
) -> None:
    """Raise CapacityError, with what is needed and what to lower, if a stage's GPU has too few bytes free.

    layers, free: of each stage.
    """
    for stage, (part, left) in enumerate(zip(layers, free, strict=True)):
        whose = f"stage {stage} of model {spec.name}" if len(layers) > 1 else f"model {spec.name}"
        _check_stage(whose, spec, limits, kv_tokens, part, left)
    if len(layers) > 1 and spec.path is None and spec.weight_bytes + SPARE > free[0]:
        need = f"model {spec.name} needs {spec.weight_bytes / 1e9:.1f} GB while its random weights are drawn"
        remedy = "choose a smaller model, or a checkpoint by model.path"
        raise CapacityError(f"{need}, but {free[0] / 1e9:.1f} GB of the first GPU's memory are free; {remedy}")


def _check_stage(whose: str, spec: ModelSpec, limits: Limits, kv_tokens: int, layers: Layers, free: int) -> None:
    need, per_token = needs(spec, limits, kv_tokens, layers), _kv_bytes(spec, layers)
    if sum(need) + SPARE <= free:
        return
    beside = need.weights + need.activations + SPARE
    if beside + per_token * limits.max_request_tokens <= free:
        remedy = f"lower kv_tokens to {int((free - beside) // per_token)}"
    elif need.weights + SPARE + need.activations / 8 <= free:
        remedy = "lower max_tokens and kv_tokens"
    else:
        other = "raise backend.pipeline_stages if there are more GPUs, choose a smaller model"
        remedy = f"{other}, or simulate several GPUs with backend=sim backend.tensor_parallel=N"
    weights, cache, activations, spare, left = (f"{amount / 1e9:.1f} GB" for amount in (*need, SPARE, free))
    raise CapacityError(
        f"{whose} needs {weights} for weights, {cache} for a KV cache of {kv_tokens} tokens, {activations} "
        f"for iterations of {limits.max_tokens} tokens and {spare} to spare, but {left} of GPU memory are free; "
        f"{remedy}"
    )


def kv_tokens_that_fit(spec: ModelSpec, limits: Limits, layers: Sequence[Layers], free: Sequence[int]) -> int:
    """Tokens of KV cache that fit beside weights and iterations in every stage; arguments as of `check_memory`.

    Raises CapacityError if not even one does.
    """
    check_memory(spec, limits, 1, layers, free)
    return min(
        int((left - sum(needs(spec, limits, 0, part)) - SPARE) // _kv_bytes(spec, part))
        for part, left in zip(layers, free, strict=True)
    )


def _kv_bytes(spec: ModelSpec, layers: Layers) -> int:
    """Bytes of keys and values that one token takes in a stage."""
    return spec.kv_bytes_per_token * layers.size // layers.total
