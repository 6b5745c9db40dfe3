"""A `transformers` decoder, or one pipeline stage of it, over the paged KV cache: only the attention of the modules is replaced.

`transformers` looks up an attention function by name and passes it every keyword argument of the model's `forward`. Each call
thus passes its batch and its cache to the attention of every layer, and no state is kept between calls.
"""

from collections.abc import Callable
from copy import copy as copy_object
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cbatch.model import Layers
from cbatch.runtime.attention import Attention, PagedCache
from cbatch.runtime.batch import Extents, Fields
from cbatch.runtime.gpu.ranks import Steps
from cbatch.runtime.iteration import Send, copy
from cbatch.runtime.sampling import greedy

ATTENTION_NAME = "cbatch_paged"  # name of `paged_attention` in `transformers`


@dataclass(slots=True, eq=False)
class PagedCall:
    """The arguments of every layer's attention in one forward pass.

    The class is not frozen: `torch.compile` unpacks a frozen dataclass and recompiles for each value of its numbers.

    kv_indices: int64 [tokens]; cache indices of the new keys and values.
    """

    cache: PagedCache
    attention: Attention
    batch: Fields[Tensor]
    kv_indices: Tensor
    bounds: Extents


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
    """Stores the new keys and values, [1, kv heads, tokens, head dim] each, then attends to each request's whole context.

    `transformers` defines the signature and the layouts. query: [1, heads, tokens, head dim], rotary positions applied. Returns
    [1, tokens, heads, head dim], and None for the attention weights.
    """
    layer: Any = module.layer_idx
    new = key[0].transpose(0, 1), value[0].transpose(0, 1)
    paged.cache.write(layer, paged.kv_indices, *new)
    paged.cache.send(layer, paged.batch.sent, *new)
    output = paged.attention(
        query[0].transpose(0, 1), *paged.cache.layer(layer), paged.batch, paged.bounds, scaling=scaling
    )
    return output[None], None


class PagedModel:
    """A causal language model, or a pipeline stage of one, that reads and writes one paged KV cache.

    layers: the computed layers, equal to the cache's layers. hidden_size: width of the hidden states. vocab_size: of all ranks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        attention: Attention,
        *,
        compiled: bool = False,
        send: Send = copy,
        greedy: Callable[[Tensor, Tensor], object] = greedy,
    ) -> None:
        """
        model: from `weights.load_model`, with `ATTENTION_NAME` as its attention.
        compiled: `torch.compile` fuses the operations between attentions, in place, layer by layer. All layers run the
            same code, which is compiled at the first call and at the first call with another number of tokens.
        send: writes hidden states to their destination.
        greedy: finds the most likely tokens, like `sampling.greedy`.
        """
        self.cache, self.layers = cache, cache.layers
        cache.sends = cache.keys.is_cpu  # a graph cannot hold `PagedCache.send`
        self.hidden_size: int = model.config.hidden_size
        self.vocab_size: int = model.config.vocab_size
        self._body = _body_of_stage(model, self.layers, cache.keys.device)
        self._norm = getattr(self._body, norm_name(self._body))
        if compiled:
            for layer in self._body.layers:
                layer.compile()
        self._head: Any = model.get_output_embeddings()
        self._attention = attention
        self._send = send
        self._greedy = greedy
        self._dtype = cache.keys.dtype

    def steps(
        self, inputs: Tensor, batch: Fields[Tensor], bounds: Extents, leaving: Tensor | None = None
    ) -> Steps[Tensor]:
        """Computes one iteration.

        Args:
            inputs: in the first stage token ids after carry-over, int32 [tokens]; else the hidden states of the preceding
                stage, float32 [tokens, hidden].
            leaving: float32 [tokens, hidden]; receives the hidden states; None in the last stage.

        Returns:
            In the last stage the logits of each row's last token, [rows, vocabulary]; else `leaving`.
        """
        paged = PagedCall(self.cache, self._attention, batch, batch.kv_indices.long(), bounds)
        hidden = yield from self._hidden(inputs, batch.positions, paged)  # [tokens, hidden]
        if leaving is None:
            logits: Tensor = self._head(hidden[batch.query_starts[1:] - 1])
            return logits
        self._send(hidden, leaving)
        return leaving

    def choose(self, logits: Tensor, out: Tensor) -> Steps[None]:
        """Writes the most likely token of each row to `out`, int32 [rows]; on a tie the lowest token id."""
        yield from ()
        self._greedy(logits, out)

    def _hidden(self, inputs: Tensor, positions: Tensor, paged: PagedCall) -> Steps[Tensor]:
        yield from ()
        kind, dtype = ("input_ids", inputs.dtype) if self.layers.is_first else ("inputs_embeds", self._dtype)
        output = self._body(
            **{kind: inputs[None].to(dtype)}, position_ids=positions[None], use_cache=False, paged=paged
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def _body_of_stage(model: PreTrainedModel, layers: Layers, device: torch.device) -> Any:
    """Returns the `transformers` model below the head, reduced to these layers. Weights are shared with `model`."""
    body: Any = copy_object(model.base_model)
    body._modules = dict(body._modules)
    body.layers = torch.nn.ModuleList(body.layers[layers.first : layers.end])
    body.rotary_emb = deepcopy(body.rotary_emb).to(device)
    if not layers.is_last:
        setattr(body, norm_name(body), torch.nn.Identity())
    return body


def norm_name(body: Any) -> str:
    """Returns the attribute name of a model's last norm in `transformers`."""
    return next(name for name in ("norm", "final_layer_norm") if hasattr(body, name))
