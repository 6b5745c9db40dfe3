"""A `transformers` decoder over the paged KV cache: its modules unchanged, except that their attention is ours.

`transformers` looks an attention function up by name and passes it every keyword that the model's `forward` was given.
In this way the batch and the cache of one call reach the attention of each layer; nothing is kept between calls.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cbatch.runtime.attention import Attention, PagedCache
from cbatch.runtime.batch import Bounds, Fields

ATTENTION_NAME = "cbatch_paged"
"""Name of `paged_attention` in `transformers`."""


@dataclass(slots=True, eq=False)
class PagedCall:
    """What the attention of every layer needs in one forward pass.

    Not frozen: `torch.compile` takes a frozen dataclass apart and compiles again for each value of its numbers.

    kv_indices: int64 [tokens]; where the new keys and values go.
    """

    cache: PagedCache
    attention: Attention
    batch: Fields[Tensor]
    kv_indices: Tensor
    bounds: Bounds


@torch.compiler.disable(reason="it changes the cache in place, by kernels of its own")  # type: ignore[untyped-decorator]
def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged: PagedCall,
    **_: Any,
) -> tuple[Tensor, None]:
    """Store the new keys and values, then attend to all of each request's; signature and layouts are `transformers`'.

    Args:
        query: [1, heads, tokens, head dim]; positions already applied.
        key, value: [1, kv heads, tokens, head dim].

    Returns:
        [1, tokens, heads, head dim], and None for the weights.
    """
    layer: Any = module.layer_idx
    paged.cache.write(layer, paged.kv_indices, key[0].transpose(0, 1), value[0].transpose(0, 1))
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
            model: made by `weights.load_model`, with `ATTENTION_NAME` for its attention.
            compiled: let `torch.compile` fuse what lies between the attentions, in place. Each layer is compiled, not
                the whole model: all layers run the same code, so it is compiled once. That happens at the first call,
                for its number of tokens, and at the first call with another number, for any number but 1.
        """
        if compiled:
            body: Any = model.base_model
            for layer in body.layers:
                layer.compile()
        self.cache = cache
        self._model = model
        self._attention = attention

    def __call__(self, token_ids: Tensor, batch: Fields[Tensor], bounds: Bounds) -> Tensor:
        """Compute one iteration.

        Args:
            token_ids: int32 [tokens]; carry-over done.
            batch: the other inputs.
            bounds: of its rows.

        Returns:
            Logits of each row's last token, [rows, vocabulary]. Only these pass through the output head.
        """
        paged = PagedCall(self.cache, self._attention, batch, batch.kv_indices.long(), bounds)
        output = self._model(
            input_ids=token_ids[None],
            position_ids=batch.positions[None],
            logits_to_keep=batch.query_starts[1:] - 1,
            use_cache=False,
            paged=paged,
        )
        logits: Tensor = output.logits[0]
        return logits
