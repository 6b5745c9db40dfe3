"""One rank of a `transformers` decoder whose matrices are shared out among the ranks of a group, on a CPU."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cbatch.model import Rank
from cbatch.runtime.attention import Attention, PagedCache
from cbatch.runtime.model import PagedCall, PagedModel
from cbatch.runtime.ranks import Meetings, Steps


class ShardedModel(PagedModel):
    """Same interface as `PagedModel`, for the model that `shards.shard` makes. The modules of each layer are unchanged.

    Every rank has the whole residual stream, and adds the parts of all ranks to it in their order: it stays the same bits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        attention: Attention,
        rank: Rank,
        meetings: Meetings,
        *,
        compiled: bool = False,
    ) -> None:
        """meetings: the group's."""
        super().__init__(model, cache, attention)
        self._rank, self._meetings = rank.index, meetings
        self._first_token = rank.share(model.config.vocab_size).start
        if compiled:
            for layer in self._body.layers:
                _attention_of(layer).compile()
                layer.mlp.compile()

    def choose(self, logits: Tensor, out: Tensor) -> Steps[None]:
        """The most likely of all ranks' tokens; on a tie the lowest."""
        places = logits.argmax(dim=-1)
        found = logits.gather(-1, places[:, None])[:, 0], places + self._first_token
        parts = yield from self._meetings.exchange(self._rank, found)
        values, tokens = (torch.stack(column) for column in zip(*parts, strict=True))  # [ranks, rows]
        out.copy_(tokens.gather(0, values.argmax(dim=0)[None])[0])

    def _hidden(self, inputs: Tensor, positions: Tensor, paged: PagedCall) -> Steps[Tensor]:
        body = self._body
        hidden = body.get_input_embeddings()(inputs[None]) if self.layers.is_first else inputs[None].to(self._dtype)
        rotations = body.rotary_emb(hidden, position_ids=positions[None])
        for layer in body.layers:
            call = {"attention_mask": None, "position_embeddings": rotations, "paged": paged}
            part, _ = _attention_of(layer)(hidden_states=layer.input_layernorm(hidden), **call)
            hidden = yield from self._add(hidden, part)
            hidden = yield from self._add(hidden, layer.mlp(layer.post_attention_layernorm(hidden)))
        norm: Tensor = self._norm(hidden)[0]
        return norm

    def _add(self, hidden: Tensor, part: Tensor) -> Steps[Tensor]:
        for each in (yield from self._meetings.exchange(self._rank, part)):
            hidden = hidden + each
        return hidden


def _attention_of(layer: Any) -> Any:
    """A layer's attention; GPT-NeoX gives it another name."""
    return getattr(layer, "self_attn", None) or layer.attention
