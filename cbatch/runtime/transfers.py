"""Copies KV blocks from one executor's caches to another's."""

from collections.abc import Sequence
from typing import Any

import torch

from cbatch.runtime.attention import PagedCache


@torch.inference_mode()
def copy_blocks(sender: Sequence[Sequence[PagedCache]], receiver: Sequence[Sequence[PagedCache]], pairs: Any) -> int:
    """Copies blocks, layer by layer; returns the bytes. Enqueues on the devices' current streams.

    sender, receiver: caches by stage and rank, of the same sizes. pairs: int32 [2, blocks], each block's number there and here.
    """
    num_bytes = 0
    for stages in zip(sender, receiver, strict=True):
        for there, here in zip(*stages, strict=True):
            source = torch.as_tensor(pairs[0]).to(there.keys.device, torch.int64)
            target = torch.as_tensor(pairs[1]).to(here.keys.device, torch.int64)
            for part in ("keys", "values"):
                for old, new in zip(
                    getattr(there, part), getattr(here, part), strict=True
                ):  # [blocks + 1, ...] of a layer
                    sent = old.index_select(0, source)
                    new.index_copy_(0, target, sent.to(new.device, non_blocking=True))
                    num_bytes += sent.numel() * sent.element_size()
    return num_bytes
