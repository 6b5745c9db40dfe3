"""The decoders of the Llama family at serving speed: the weights of `transformers`, eight kernels per layer.

    add to residual, normalise | q, k, v | rotate, write keys and values | attend | project |
    add to residual, normalise | SiLU(gate) * up | down

The modules remain usable: their projections become views of the fused matrices. This model and its reference,
`PagedModel`, share one set of weights.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from cbatch.limits import Limits
from cbatch.model import Layers, ModelSpec, Rank
from cbatch.runtime.attention import Attention, PagedCache
from cbatch.runtime.batch import Extents, Fields
from cbatch.runtime.fast.argmax import CHUNK, argmax, choose_share, search_share
from cbatch.runtime.fast.fused_ops import add_norm, rotate_and_store
from cbatch.runtime.fast.linear import Product
from cbatch.runtime.gpu.exchange import Exchange, Meeting
from cbatch.runtime.gpu.memory import box_rows
from cbatch.runtime.gpu.peers import send
from cbatch.runtime.gpu.ranks import Steps, finish
from cbatch.runtime.weights import can_fuse


class Layer(NamedTuple):
    """One decoder layer.

    qkv_bias: [(heads + 2 kv heads) * head dim]; None where the family has none.
    head_norms: weights of the norms of each query and key head, [head dim] each; None where the family has none.
    """

    attention_norm: torch.Tensor  # [hidden]
    qkv: Product
    qkv_bias: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Product
    feed_forward_norm: torch.Tensor  # [hidden]
    gate_up: Product
    down: Product


class FusedModel:
    """Same interface and tokens as `PagedModel`; in bfloat16 equal up to rounding.

    Pipelined results are bit-identical: a stage sends the float32 sum that a single GPU would normalise next. With an exchange the
    model computes one rank's share, with modules from `shards.shard` and the spec from `topology.share_of`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        cache: PagedCache,
        attention: Attention,
        *,
        max_rows: int,
        max_positions: int,
        exchange: Exchange | None = None,
        quack: bool = False,
    ) -> None:
        """
        model: from `weights.load_model`, with the cache's layers on the cache's GPU; the projections are fused in place.
        max_rows: most rows of an iteration.
        max_positions: tokens of the longest request.
        exchange: exchange with the other ranks of the group; None for a single rank.
        quack: see `Product`.
        """
        assert can_fuse(spec), "the caller chooses PagedModel for other models"
        body: Any = model.model
        head: Any = model.lm_head
        device = cache.keys.device
        properties = torch.cuda.get_device_properties(device)
        self.cache, self.layers, self.hidden_size = cache, cache.layers, spec.hidden_size
        self.dependent = properties.major >= 9
        self._num_processors = properties.multi_processor_count
        self._attention = attention
        self._num_heads = spec.num_heads
        self._scaling: float = body.layers[0].self_attn.scaling
        self._epsilon: float = body.norm.variance_epsilon
        self._dtype = cache.keys.dtype
        self._exchange = exchange
        self._quack = quack
        self._layers = [self._fuse(layer) for layer in body.layers[self.layers.first : self.layers.end]]
        self._rotations = rotations(body.rotary_emb, max_positions).to(device)
        if self.layers.is_first:
            self._embedding: torch.Tensor = body.embed_tokens.weight  # [vocabulary, hidden]
        if self.layers.is_last:
            self._norm: torch.Tensor = body.norm.weight
            self._head = self._product(head.weight)
            self._logits = torch.zeros((max_rows, spec.vocab_size), device=device)

    @torch.inference_mode()
    def __call__(
        self, inputs: torch.Tensor, batch: Fields[torch.Tensor], bounds: Extents, leaving: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes one iteration without other ranks."""
        return finish(self.steps(inputs, batch, bounds, leaving))

    def steps(
        self, inputs: torch.Tensor, batch: Fields[torch.Tensor], bounds: Extents, leaving: torch.Tensor | None = None
    ) -> Steps[torch.Tensor]:
        """See `PagedModel`. `leaving` may be on another GPU that this GPU can access.

        Returns:
            Logits, float32 [rows, vocabulary], in a buffer of the model: valid until the next call, and always at the same
            address, as a captured graph requires. Logits of empty rows are undefined.
        """
        has_chunks = bounds.max_query_len > 1 or len(inputs) != len(batch.context_lens)
        sampled = batch.query_starts[1:] - 1 if has_chunks and self.layers.is_last else None  # each row's last token
        arriving: torch.Tensor | None = None
        if self.layers.is_first:
            residual = embedding(inputs, self._embedding)  # [tokens, hidden]
        else:
            residual, arriving = torch.empty_like(inputs, dtype=self._dtype), inputs
        parts: torch.Tensor | None = None
        meeting: Meeting | None = None
        for index, layer in enumerate(self._layers, self.layers.first):
            keys, values = self.cache.layer(index)
            x = add_norm(
                parts,
                residual,
                layer.attention_norm,
                self._epsilon,
                dependent=self.dependent,
                source=arriving,
                meeting=meeting,
            )
            arriving = None
            query = rotate_and_store(
                layer.qkv(x),
                self._rotations,
                batch.positions,
                batch.kv_indices,
                keys,
                values,
                self._num_heads,
                sent=batch.sent,
                addresses=self.cache.addresses,
                layer=index - self.layers.first,
                bias=layer.qkv_bias,
                norms=layer.head_norms,
                epsilon=self._epsilon,
                dependent=self.dependent,
            )
            attended = self._attention(query, keys, values, batch, bounds, scaling=self._scaling).flatten(1)
            if sampled is not None and index == self.layers.end - 1:  # the other tokens are not read after this
                attended, residual = attended[sampled], residual[sampled]
            meeting = self._meeting(2 * (index - self.layers.first))
            parts = layer.output(attended, meeting)
            yield
            x = add_norm(
                parts, residual, layer.feed_forward_norm, self._epsilon, dependent=self.dependent, meeting=meeting
            )
            gated = layer.gate_up(x)[0]
            meeting = self._meeting(2 * (index - self.layers.first) + 1)
            parts = layer.down(gated, meeting)
            yield
        if leaving is not None:
            send(residual, leaving, parts=parts, dependent=self.dependent, meeting=meeting)
            return leaving
        x = add_norm(parts, residual, self._norm, self._epsilon, dependent=self.dependent, meeting=meeting)
        logits = self._logits[: len(x)]
        self._head.into(logits, x)
        return logits

    def choose(self, logits: torch.Tensor, out: torch.Tensor) -> Steps[None]:
        """Chooses the likeliest token over all ranks; see `PagedModel`. `out` may be on another GPU."""
        exchange = self._exchange
        if exchange is None:
            argmax(logits, out)
            return
        meeting = exchange.meeting(2 * self.layers.size)
        search_share(logits, exchange, meeting)
        yield
        choose_share(out, exchange, meeting)

    def start(self) -> None:
        """See `Exchange.start`."""
        if self._exchange is not None:
            self._exchange.start()

    def _meeting(self, number: int) -> Meeting | None:
        return None if self._exchange is None else self._exchange.meeting(number)

    def _fuse(self, layer: Any) -> Layer:
        attention, feed_forward = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [projection.bias for projection in projections]
        norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
        return Layer(
            attention_norm=layer.input_layernorm.weight,
            qkv=self._product(join(projections)),
            qkv_bias=None if biases[0] is None else torch.cat(biases),
            head_norms=norms,
            # no overlap: prefetching gate_up's weights takes longer than the norm in between, and would delay output's last reads
            output=self._product(attention.o_proj.weight, overlaps=False),
            feed_forward_norm=layer.post_attention_layernorm.weight,
            gate_up=self._product(join([feed_forward.gate_proj, feed_forward.up_proj]), gated=True),
            down=self._product(feed_forward.down_proj.weight),
        )

    def _product(self, weight: torch.Tensor, *, gated: bool = False, overlaps: bool = True) -> Product:
        settings: dict[str, Any] = {"dependent": self.dependent, "quack": self._quack}
        return Product(weight, self._num_processors, gated=gated, overlaps=overlaps, **settings)


def exchanges_of(spec: ModelSpec, limits: Limits, layers: Layers, devices: Sequence[torch.device]) -> list[Exchange]:
    """Returns the exchange of each rank of a stage, on its GPU, connected to the others."""
    exchanges = [
        Exchange(
            Rank(index, len(devices)),
            device,
            getattr(torch, spec.dtype),
            box=box_rows(limits) * spec.hidden_size,
            num_meetings=2 * layers.size + layers.is_last,
            max_rows=limits.max_rows,
            vocabulary=spec.vocab_size,
            chunk=CHUNK,
        )
        for index, device in enumerate(devices)
    ]
    for exchange in exchanges:
        exchange.meet(exchanges)
    return exchanges


def join(projections: list[Any]) -> torch.Tensor:
    """Concatenates the weights of several projections to [all outputs, inputs], and turns their weights into views of the result."""
    sizes = [projection.weight.shape[0] for projection in projections]
    fused = torch.cat([projection.weight for projection in projections])
    for projection, part in zip(projections, fused.split(sizes), strict=True):
        projection.weight.data = part
    return fused


def rotations(rotary: Any, max_positions: int) -> torch.Tensor:
    """Returns cosines and sines of the rotary embedding for every position, float32 [positions, 2, head dim / 2]."""
    device = rotary.inv_freq.device
    positions = torch.arange(max_positions, device=device)[None]
    cosines, sines = rotary(torch.zeros(1, device=device), positions)  # [1, positions, head dim], both halves equal
    half = cosines.shape[-1] // 2
    return torch.stack([cosines[0, :, :half], sines[0, :, :half]], dim=1).contiguous()
