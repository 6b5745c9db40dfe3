"""Estimates the GPU memory that an executor takes, before it is allocated."""

from typing import NamedTuple

from cbatch.errors import CapacityError
from cbatch.limits import Limits
from cbatch.model import DTYPE_BYTES, ModelSpec

SPARE = 2e9
"""Bytes left to the driver, CUDA graphs, kernels and libraries' workspaces."""

GRAPH_SHARE = 0.5
"""Memory of the captured graphs, as a share of the activations of the largest iteration: their shapes are smaller."""


class Needs(NamedTuple):
    """Bytes by purpose. activations: those of an iteration at its limits, and the graphs beside it."""

    weights: int
    kv_cache: int
    activations: int


def needs(spec: ModelSpec, limits: Limits, kv_tokens: int) -> Needs:
    """Bytes that a model, its cache and its largest iteration take."""
    widths = spec.linear_shapes
    # residual, normalised and attended; q, k, v and query; gates and ups and their product
    values = 3 * spec.hidden_size + 2 * widths["qkv"][1] + widths["gate_up"][1] + spec.intermediate_size
    tokens = limits.max_tokens * values * DTYPE_BYTES[spec.dtype]
    logits = 3 * limits.max_batch * spec.vocab_size * 4
    activations = round(tokens * (1 + GRAPH_SHARE)) + logits
    return Needs(spec.weight_bytes, kv_tokens * spec.kv_bytes_per_token, activations)


def check_memory(spec: ModelSpec, limits: Limits, kv_tokens: int, free: int) -> None:
    """Raise CapacityError, with what is needed and what to lower, if `free` bytes of the device do not suffice."""
    need = needs(spec, limits, kv_tokens)
    if sum(need) + SPARE <= free:
        return
    beside = need.weights + need.activations + SPARE
    if beside + spec.kv_bytes_per_token * limits.max_request_tokens <= free:
        remedy = f"lower kv_tokens to {int((free - beside) // spec.kv_bytes_per_token)}"
    elif need.weights + SPARE + need.activations / 8 <= free:
        remedy = "lower max_tokens and kv_tokens"
    else:
        remedy = "choose a smaller model, or simulate several GPUs with backend=sim backend.tensor_parallel=N"
    weights, cache, activations, spare, left = (f"{amount / 1e9:.1f} GB" for amount in (*need, SPARE, free))
    raise CapacityError(
        f"model {spec.name} needs {weights} for weights, {cache} for a KV cache of {kv_tokens} tokens, {activations} "
        f"for iterations of {limits.max_tokens} tokens and {spare} to spare, but {left} of GPU memory are free; "
        f"{remedy}"
    )


def kv_tokens_that_fit(spec: ModelSpec, limits: Limits, free: int) -> int:
    """Tokens of KV cache that fit beside weights and iterations. Raises CapacityError if not even one does."""
    check_memory(spec, limits, 1, free)
    return int((free - sum(needs(spec, limits, 0)) - SPARE) // spec.kv_bytes_per_token)
