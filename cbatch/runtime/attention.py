"""The paged KV cache, and attention over it: one small interface with several kernels behind it.

A kernel knows nothing about models, streams or requests. The fast kernels are in `cbatch.runtime.fast.attention`.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cbatch.errors import ConfigError
from cbatch.kv import KVSize, blocks_for
from cbatch.model import Layers, ModelSpec
from cbatch.runtime.batch import Extents, Fields

PLACE_BITS = 26
"""Bits of a place in `Step.sent` that hold the index in a receiver's cache. Those above hold the number of the receiver, from 1."""


class PagedCache:
    """The memory of the blocks of `cbatch.kv`: keys and values, [blocks + 1, block size, kv heads, head dim] per layer.

    layers: the layers of the stage that the cache belongs to. both: [2, layers, ...], keys before values. texts: int32 [blocks + 1, block size],
    in the first stage the token of each key and value, if iterations have drafts, which are made from them.

    receivers: caches of other executors, numbered from 1, that iterations write to as well. addresses: int64 [31 + 1, 3], for a kernel: of
    each, where keys and values begin, and the elements of a layer. sends: whether the model writes to them.

    The last block is the dummy block. Padding writes to it, so padding needs no branch. No row reads it.
    Owner: the iteration. Only the compute stream reads and writes the cache.
    """

    def __init__(self, spec: ModelSpec, size: KVSize, device: torch.device, layers: Layers | None = None) -> None:
        """layers: None means all layers of the model."""
        self.layers = layers or Layers(0, spec.num_layers, spec.num_layers)
        shape = (2, self.layers.size, size.num_blocks + 1, size.block_size, spec.num_kv_heads, spec.head_dim)
        self.both = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)
        self.keys, self.values = self.both
        self.texts = torch.zeros(shape[2:4], dtype=torch.int32, device=device)
        self.size = size
        self.receivers: list[PagedCache] = []
        self.addresses = torch.zeros((2 ** (31 - PLACE_BITS), 3), dtype=torch.int64, device=device)
        self.sends = True

    def connect(self, receiver: "PagedCache") -> int:
        """Adds a receiver, of equal shape but for the blocks, unless it is there; returns the place in `Step.sent` of its index 0.

        Raises ConfigError if the model does not write to receivers.
        """
        if not self.sends:
            problem = "backend.transfers.layerwise=true: on GPUs only the fused models send each layer"
            raise ConfigError(f"{problem}; choose one of them with runtime.compile=false, or give layerwise=false")
        if receiver not in self.receivers:
            self.receivers.append(receiver)
            addresses = receiver.keys.data_ptr(), receiver.values.data_ptr(), receiver.keys.stride(0)
            self.addresses[len(self.receivers)] = torch.tensor(addresses)
        return (self.receivers.index(receiver) + 1) << PLACE_BITS

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of one layer, [blocks + 1, block size, kv heads, head dim] each."""
        place = index - self.layers.first
        return self.keys[place], self.values[place]

    def write(self, layer: int, indices: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores the keys and values of new tokens, [tokens, kv heads, head dim] each.

        layer: index of the layer in the model. indices: int64 [tokens]; block * block size + offset.
        """
        for cache, new in zip(self.layer(layer), (keys, values), strict=True):
            cache.flatten(0, 1).index_copy_(0, indices, new)

    def send(self, layer: int, sent: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores the keys and values of new tokens in the receivers. sent: int32 [tokens], see `Step.sent`; the others: as in `write`."""
        for number, receiver in enumerate(self.receivers, 1):
            tokens = (sent >> PLACE_BITS == number).nonzero()[:, 0]
            receiver.write(layer, sent[tokens].long() % 2**PLACE_BITS, keys[tokens], values[tokens])


class Attention(Protocol):
    """Causal, grouped-query attention of one layer.

    The queries are the tokens of the iteration's requests, one request after the other, for both chunks and decodes. The
    queries of a request are the *last* tokens of its context: query i of n attends to the keys 0 to context_len - n + i.
    Query head h reads kv head h // (heads / kv heads).
    """

    name: str  # name that is printed and stored with a run's results

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: Fields[Tensor], bounds: Extents, *, scaling: float
    ) -> Tensor:
        """
        query: [tokens, heads, head dim].
        keys, values: [blocks + 1, block size, kv heads, head dim] of a layer; already include this iteration's tokens.
        batch: `query_starts`, `context_lens` and `block_tables` are read.
        bounds: upper bounds, with which a kernel need not read lengths from the device.
        scaling: factor applied to the products of query and key.

        Returns:
            [tokens, heads, head dim]; undefined at padding tokens.
        """


class ReferenceAttention:
    """Paged attention in plain PyTorch: runs on CPUs, and is the reference that the other kernels are tested against.

    Copies each request's blocks into contiguous memory and calls PyTorch's attention: once, padded, for all requests with
    one query, and once for each prompt chunk. Lengths are read from the device, so a graph cannot capture the calls.
    """

    name = "reference"

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: Fields[Tensor], bounds: Extents, *, scaling: float
    ) -> Tensor:
        output = torch.zeros_like(query)  # [tokens, heads, head dim]
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        singles = [row for row, context in enumerate(contexts) if context and starts[row + 1] - starts[row] == 1]
        if singles:
            rows = torch.tensor(singles, device=query.device)
            tokens = batch.query_starts[rows]
            context = _gather(keys, values, batch.block_tables[rows], max(contexts[row] for row in singles))
            output[tokens] = _decode(query[tokens], *context, batch.context_lens[rows], scaling)
        for row, length in enumerate(contexts):
            begin, end = starts[row], starts[row + 1]
            if end - begin > 1:
                context = _gather(keys, values, batch.block_tables[row : row + 1], length)
                output[begin:end] = _chunk(query[begin:end], *context, scaling)
        return output


def _gather(keys: Tensor, values: Tensor, block_tables: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns copies of the first `length` keys and values of the requests, [rows, kv heads, length, head dim] each."""
    tables = block_tables[:, : blocks_for(length, keys.shape[1])]
    first, second = (part[tables].flatten(1, 2)[:, :length].transpose(1, 2) for part in (keys, values))
    return first, second


def _decode(query: Tensor, keys: Tensor, values: Tensor, context_lens: Tensor, scaling: float) -> Tensor:
    """Attends with one query per request, [rows, heads, head dim], to its context; contexts are padded to the longest.

    Keys and values past the end of a context may be NaN. Masking alone does not suffice, since 0 * NaN is not 0: such keys
    and values are also zeroed in place.
    """
    beyond = torch.arange(keys.shape[2], device=keys.device) >= context_lens[:, None]  # [rows, length]
    for part in (keys, values):
        part.masked_fill_(beyond[:, None, :, None], 0)
    seen = ~beyond[:, None, None, :]  # [rows, 1, 1, length]
    query = query[:, :, None]  # [rows, heads, 1, head dim]
    return scaled_dot_product_attention(query, keys, values, seen, scale=scaling, enable_gqa=True)[:, :, 0]


def _chunk(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attends causally with the last queries of one request, [tokens, heads, head dim]."""
    num_queries, num_keys = query.shape[0], keys.shape[2]
    position = torch.arange(num_keys - num_queries, num_keys, device=query.device)
    seen = torch.arange(num_keys, device=query.device) <= position[:, None]  # [queries, keys]
    query = query.transpose(0, 1)[None]  # [1, heads, tokens, head dim]
    return scaled_dot_product_attention(query, keys, values, seen, scale=scaling, enable_gqa=True)[0].transpose(0, 1)
