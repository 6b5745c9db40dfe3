"""A `transformers` decoder over the paged KV cache: its modules as they are, their attention replaced by ours.

`transformers` looks an attention function up by name and hands it every keyword that the model's `forward` was given. By
that road the batch and the cache of one call reach the attention of each layer; nothing is kept between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from cbatch.runtime.attention import Attention
from cbatch.runtime.batch import Bounds, Fields
from cbatch.runtime.kv_cache import PagedCache

ATTENTION_NAME = "cbatch_paged"


@dataclass(slots=True, eq=False)
class PagedCall:
    """What the attention of every layer needs in one forward pass.

    Not frozen: `torch.compile` takes a frozen dataclass apart, and compiles anew for each of the numbers in it.

    slots: int64 [tokens]; where the new keys and values go.
    """

    cache: PagedCache
    attention: Attention
    batch: Fields[torch.Tensor]
    slots: torch.Tensor
    bounds: Bounds


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to `transformers`; before a model is built with it."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


@torch.compiler.disable(reason="it changes the cache in place, by kernels of its own")  # type: ignore[untyped-decorator]
def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: PagedCall,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Store the new keys and values, then attend to all of each request's; signature and layouts are `transformers`'.

    Args:
        query: [1, heads, tokens, head dim]; positions already applied.
        key, value: [1, kv heads, tokens, head dim].

    Returns:
        [1, tokens, heads, head dim], and None for the weights.
    """
    layer: Any = module.layer_idx
    paged.cache.write(layer, paged.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    output = paged.attention(
        query[0].transpose(0, 1), *paged.cache.layer(layer), paged.batch, paged.bounds, scaling=scaling
    )
    return output[None], None


class PagedModel:
    """A causal language model that reads and writes one paged KV cache."""

    def __init__(
        self, model: PreTrainedModel, cache: PagedCache, attention: Attention, *, compiled: bool = False
    ) -> None:
        """
        Args:
            model: as `weights.load_model` makes it, with `ATTENTION_NAME` for its attention.
            compiled: compile the layers, see `compile_layers`.
        """
        if compiled:
            compile_layers(model)
        self.cache = cache
        self._model = model
        self._attention = attention

    def __call__(self, token_ids: torch.Tensor, batch: Fields[torch.Tensor], bounds: Bounds) -> torch.Tensor:
        """Compute one iteration.

        Args:
            token_ids: int32 [tokens]; carry-over done.
            batch: the other inputs.
            bounds: of its rows.

        Returns:
            Logits of each row's last token, [rows, vocabulary]. The output head sees no other token.
        """
        paged = PagedCall(self.cache, self._attention, batch, batch.kv_slots.long(), bounds)
        output = self._model(
            input_ids=token_ids[None],
            position_ids=batch.positions[None],
            logits_to_keep=batch.query_starts[1:] - 1,
            use_cache=False,
            paged=paged,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def compile_layers(model: PreTrainedModel) -> None:
    """Let `torch.compile` fuse what lies between the attentions of a model, in place.

    A layer is the unit: all layers run the same code, so it is compiled once and not once a layer. Nothing is compiled here
    but at the first call, for its number of tokens; at the first call with another number, for any but 1.
    """
    body: Any = model.base_model
    for layer in body.layers:
        layer.compile()
