"""Copies KV blocks from one executor's caches to another's."""

from collections.abc import Sequence
from typing import Any

import torch

from cbatch.runtime.attention import PagedCache


@torch.inference_mode()
def copy_blocks(sender: Sequence[Sequence[PagedCache]], receiver: Sequence[Sequence[PagedCache]], pairs: Any) -> int:
    """Copies blocks, layer by layer; returns the bytes. On a CPU; `gpu.transfers` has the copies between GPUs.

    sender, receiver: caches by stage and rank, of the same sizes. pairs: int32 [2, blocks], each block's number there and here.
    """
    num_bytes = 0
    for stages in zip(sender, receiver, strict=True):
        for there, here in zip(*stages, strict=True):
            source, target = (torch.as_tensor(blocks).long() for blocks in pairs)
            here.texts.index_copy_(0, target, there.texts.index_select(0, source))
            for old, new in zip(there.both.flatten(0, 1), here.both.flatten(0, 1), strict=True):  # [blocks + 1, ...]
                sent = old.index_select(0, source)
                new.index_copy_(0, target, sent)
                num_bytes += sent.nbytes
    return num_bytes
