"""Estimates the GPU memory of an executor before allocating it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from cbatch.errors import CapacityError
from cbatch.limits import Limits
from cbatch.model import DTYPE_BYTES, Layers, ModelSpec, Rank
from cbatch.model.topology import share_of

SPARE = 2e9  # bytes reserved for the driver, CUDA graphs, kernels and libraries' workspaces

GRAPH_SHARE = 0.5
"""Memory of the captured graphs, as a share of the activations of the largest iteration; below 1 since their shapes are smaller."""

TOO_LARGE = 100e9
"""Random weights of more bytes are drawn on the GPUs that keep them; smaller models are drawn on the first GPU. The limit depends
on the model's size and not on the machine's memory, so every split of a model has the same weights."""

BOX_ROWS = 512
"""Fewest rows of parts that ranks hold for each other: 64 rows of a product whose inputs are split into eight."""


LOOK_UP_BYTES = 40
"""Bytes per place of a request's text, up to the longest length, while drafts are looked up: a copy of the text, and nine times as much for a drafter."""


class Needs(NamedTuple):
    """Bytes by purpose. activations: activations of an iteration at its limits, plus the captured graphs."""

    weights: int
    kv_cache: int
    activations: int


def needs(
    spec: ModelSpec, limits: Limits, kv_tokens: int, layers: Layers, num_ranks: int = 1, draft: ModelSpec | None = None
) -> Needs:
    """Returns the bytes of one rank's share of a stage: weights, KV cache and the largest iteration.

    draft: a draft model, whole on each rank of the first stage.
    """
    size = DTYPE_BYTES[spec.dtype]
    share = share_of(spec, Rank(num_ranks - 1, num_ranks))  # the last rank has the largest share
    if num_ranks > 1:  # a rank's part of a tied head is a copy
        share = replace(share, tied_embeddings=False)
    tokens = limits.max_tokens * share.activation_bytes_per_token
    logits = 3 * limits.max_rows * spec.vocab_size * 4 * layers.is_last
    arriving = 0 if layers.is_first else (limits.num_stages + 1) * limits.max_tokens * spec.hidden_size * 4
    boxes = 2 * (num_ranks - 1) * box_rows(limits) * spec.hidden_size * size
    embedding = (spec.vocab_size - share.vocab_size) * spec.hidden_size * size * layers.is_first  # not split
    drafts = LOOK_UP_BYTES * limits.max_batch * limits.max_request_tokens * (layers.is_first and limits.max_drafts > 0)
    activations = round(tokens * (1 + GRAPH_SHARE)) + logits + arriving + boxes + drafts
    weights = layers.weight_bytes(share) + embedding
    kv_bytes = share.kv_bytes_per_token * layers.size // layers.total  # per token in this stage
    need = Needs(weights, kv_tokens * kv_bytes, activations)
    if draft is None or not layers.is_first:
        return need
    more = needs(draft, limits, kv_tokens, Layers(0, draft.num_layers, draft.num_layers))
    return Needs(*map(sum, zip(need, more, strict=True)))


def box_rows(limits: Limits) -> int:
    """Returns the rows of hidden states in each of the two boxes that a rank holds per other rank."""
    return max(limits.max_tokens, limits.max_rows, BOX_ROWS)


def check_memory(
    spec: ModelSpec,
    limits: Limits,
    kv_tokens: int,
    layers: Sequence[Layers],
    free: Sequence[int],
    num_ranks: int = 1,
    draft: ModelSpec | None = None,
) -> None:
    """Raises CapacityError if a stage's GPU has too little free memory. The message states the need and the remedy.

    layers, free: layers and free bytes of each stage. num_ranks: ranks per stage, which share the stage's weights and cache. draft: see `needs`.
    """
    for stage, (part, left) in enumerate(zip(layers, free, strict=True)):
        where = f"stage {stage} of " if len(layers) > 1 else ""
        beside = f" with draft model {draft.name}" if draft is not None and part.is_first else ""
        whose = f"{'each rank of ' if num_ranks > 1 else ''}{where}model {spec.name}{beside}"
        _check_stage(
            whose, partial(needs, spec, limits, layers=part, num_ranks=num_ranks, draft=draft), limits, kv_tokens, left
        )
    one_gpu = len(layers) == num_ranks == 1
    drawn = spec.weight_bytes + (needs(spec, limits, 0, layers[0], num_ranks).weights if num_ranks > 1 else 0)
    whole = spec.path is None and spec.weight_bytes <= TOO_LARGE
    if whole and not one_gpu and drawn + SPARE > free[0]:
        need = f"model {spec.name} needs {drawn / 1e9:.1f} GB while its random weights are drawn"
        remedy = "choose a smaller model, or a checkpoint by model.path"
        raise CapacityError(f"{need}, but {free[0] / 1e9:.1f} GB of the first GPU's memory are free; {remedy}")


def _check_stage(whose: str, needs_of: Callable[..., Needs], limits: Limits, kv_tokens: int, free: int) -> None:
    need, single = (needs_of(kv_tokens=tokens) for tokens in (kv_tokens, 1))
    per_token = single.kv_cache
    if sum(need) + SPARE <= free:
        return
    beside = need.weights + need.activations + SPARE
    if beside + per_token * limits.max_request_tokens <= free:
        remedy = f"lower kv_tokens to {int((free - beside) // per_token)}"
    elif need.weights + SPARE + need.activations / 8 <= free:
        remedy = "lower max_tokens and kv_tokens"
    else:
        other = "with more GPUs raise backend.tensor_parallel or backend.pipeline_stages, else choose a smaller model"
        remedy = f"{other}, or simulate several GPUs with backend=sim backend.tensor_parallel=N"
    weights, cache, activations, spare, left = (f"{amount / 1e9:.1f} GB" for amount in (*need, SPARE, free))
    raise CapacityError(
        f"{whose} needs {weights} for weights, {cache} for a KV cache of {kv_tokens} tokens, {activations} "
        f"for iterations of {limits.max_tokens} tokens and {spare} to spare, but {left} of GPU memory are free; "
        f"{remedy}"
    )


def kv_tokens_that_fit(
    spec: ModelSpec,
    limits: Limits,
    layers: Sequence[Layers],
    free: Sequence[int],
    num_ranks: int = 1,
    draft: ModelSpec | None = None,
) -> int:
    """Returns the tokens of KV cache that fit beside weights and iterations in every stage. Arguments are as in `check_memory`.

    Raises CapacityError if none fits.
    """
    check_memory(spec, limits, 1, layers, free, num_ranks, draft)
    tokens = []
    for part, left in zip(layers, free, strict=True):
        need = needs(spec, limits, 1, part, num_ranks, draft)
        tokens.append(int((left - need.weights - need.activations - SPARE) // need.kv_cache))
    return min(tokens)
