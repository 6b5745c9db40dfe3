"""Makes one rank's share of a model: weights sliced from the whole model or drawn on the rank's device, and the CPU computation."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cbatch.model import Layers, ModelSpec, Rank
from cbatch.runtime.attention import Attention, PagedCache
from cbatch.runtime.gpu.ranks import Meetings, Steps
from cbatch.runtime.model import PagedCall, PagedModel
from cbatch.runtime.weights import load_skeleton, transformers_config

BY_OUTPUTS = ("q_proj", "query_key_value", "gate_proj", "up_proj", "dense_h_to_4h", "lm_head", "embed_out")
BY_KV_HEADS = ("k_proj", "v_proj")
BY_INPUTS = ("o_proj", "dense", "down_proj", "dense_4h_to_h")
"""Matrices split by outputs, by the outputs of key-value heads, and by inputs. Other matrices are not split."""


def shard(
    model: PreTrainedModel, spec: ModelSpec, rank: Rank, layers: Sequence[Layers], devices: Sequence[torch.device]
) -> PreTrainedModel:
    """Returns a copy of the model whose matrices are one rank's shares, placed on the rank's device in each stage.

    Projections split by inputs give partial sums; only the first rank adds the bias.
    """
    return _share_out(model, spec, rank, layers, devices, lambda name, weight, device: weight)


def draw_shard(
    spec: ModelSpec, rank: Rank, layers: Sequence[Layers], devices: Sequence[torch.device]
) -> PreTrainedModel:
    """Like `shard`, for random weights of a model that is too large for one GPU: holds one whole matrix at a time.

    Each matrix is drawn from its own seed, on the device that keeps the share, so its values do not depend on the split.
    """
    config = transformers_config(spec)

    def draw(name: str, weight: Tensor, device: torch.device) -> Tensor:
        values = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        if weight.dim() == 1:
            return values.fill_(0 if name.endswith("bias") else 1)
        generator = torch.Generator(device).manual_seed(crc32(f"{spec.seed} {name}".encode()))
        return values.normal_(0, config.initializer_range, generator=generator)

    made = _share_out(load_skeleton(spec, config), spec, rank, layers, devices, draw)
    body: Any = made.base_model
    with devices[0]:
        body.rotary_emb = type(body.rotary_emb)(config)
    return made


def _share_out(
    model: PreTrainedModel,
    spec: ModelSpec,
    rank: Rank,
    layers: Sequence[Layers],
    devices: Sequence[torch.device],
    whole: Callable[[str, Tensor, torch.device], Tensor],
) -> PreTrainedModel:
    """Returns one rank's share. whole: maps a parameter's name, the parameter and its device to the whole parameter's values."""
    places = {index: device for part, device in zip(layers, devices, strict=True) for index in range(*part[:2])}
    embedding = cast(Any, model.get_input_embeddings()).weight
    tied = cast(Any, model.get_output_embeddings()).weight is embedding
    shares: dict[int, Any] = {}
    for name, weight in model.named_parameters():
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        device = places[number] if number is not None else devices[0 if weight is embedding else -1]
        values = whole(name, weight, device)
        shares[id(weight)] = _parameter(_share(values, name, spec, rank), device)
        if tied and weight is embedding:
            head = _parameter(values[rank.share(spec.vocab_size)], devices[-1])
    made = cast(PreTrainedModel, deepcopy(model, shares))  # the modules are copied, the parameters replaced
    if tied:
        cast(Any, made.get_output_embeddings()).weight = head
    for name, module in made.named_modules() if rank.index else ():
        if name.rpartition(".")[2] in BY_INPUTS:
            module.bias = None
    return made


def _share(weight: Tensor, name: str, spec: ModelSpec, rank: Rank) -> Tensor:
    """Returns a rank's part of a parameter, which is a weight, [outputs, inputs], or a bias, [outputs]."""
    *_, module, kind = name.split(".")
    if module in BY_OUTPUTS:
        return weight[rank.share(len(weight))]
    if module in BY_KV_HEADS:
        heads: Tensor = weight.unflatten(0, (spec.num_kv_heads, -1))
        return heads[rank.kv_heads(spec.num_kv_heads)].flatten(0, 1)
    if module in BY_INPUTS and kind == "weight":
        return weight[:, rank.share(weight.shape[1])]
    return weight


def _parameter(weight: Tensor, device: torch.device) -> torch.nn.Parameter:
    copy = weight.detach().to(device, copy=True, memory_format=torch.contiguous_format)
    return torch.nn.Parameter(copy, requires_grad=False)


class ShardedModel(PagedModel):
    """Same interface as `PagedModel`, for the model that `shard` makes. The modules of each layer are unchanged.

    Every rank has the whole residual stream, and adds the parts of all ranks in the same order, so the stream is bit-identical.
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
        """meetings: shared by the ranks of the group."""
        super().__init__(model, cache, attention)
        self._rank, self._meetings = rank.index, meetings
        self._first_token = rank.share(model.config.vocab_size).start
        if compiled:
            for layer in self._body.layers:
                _attention_of(layer).compile()
                layer.mlp.compile()

    def choose(self, logits: Tensor, out: Tensor) -> Steps[None]:
        """Writes the most likely token over all ranks; on a tie the lowest token id."""
        places = logits.argmax(dim=-1)
        likeliest = logits.gather(-1, places[:, None])[:, 0], places + self._first_token
        parts = yield from self._meetings.exchange(self._rank, likeliest)
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
        for addend in (yield from self._meetings.exchange(self._rank, part)):
            hidden = hidden + addend
        return hidden


def _attention_of(layer: Any) -> Any:
    """Returns a layer's attention module; GPT-NeoX names it differently."""
    return getattr(layer, "self_attn", None) or layer.attention
