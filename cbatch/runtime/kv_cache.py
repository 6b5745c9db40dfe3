"""The memory behind the blocks of `cbatch.kv`: keys and values of every layer, in pages.

A page is one block of one layer. Which page belongs to whom, and since when, is the block pool's affair; here there are
only numbers of pages.
"""

from __future__ import annotations

import torch

from cbatch.kv import KVSize
from cbatch.model import ModelSpec


class PagedCache:
    """Keys and values, [pages + 1, page size, kv heads, head dim] for each layer.

    The last page is the dummy page: padding writes to it, so that padding needs no branch, and no row reads it.

    Owner: the iteration; only the compute stream writes, and only it reads.
    """

    def __init__(self, spec: ModelSpec, size: KVSize, device: torch.device, *, poison: bool = False) -> None:
        """
        Args:
            poison: fill the pages with NaN, so that reading what was never written shows in every later token.
        """
        shape = (spec.num_layers, size.num_blocks + 1, size.block_size, spec.num_kv_heads, spec.head_dim)
        fill = torch.nan if poison else 0.0
        self.keys = torch.full(shape, fill, dtype=getattr(torch, spec.dtype), device=device)
        self.values = torch.full_like(self.keys, fill)

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The key pages and value pages of one layer, [pages + 1, page size, kv heads, head dim] each."""
        return self.keys[index], self.values[index]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the keys and values of new tokens.

        Args:
            slots: int64 [tokens]; page * page size + offset.
            keys, values: [tokens, kv heads, head dim].
        """
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)
