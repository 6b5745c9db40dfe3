"""Options of the executors that compute real tokens. Does not import torch, so settings can import this module."""

from dataclasses import dataclass
from typing import Literal

from cbatch.drafts import Drafter

AttentionName = Literal["auto", "flash4", "triton"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `cpu.build` and `gpu.build`.

    compiled: compile the layers of the `transformers` modules with `torch.compile`, instead of using the fused model.
    fused: use the fused model if the family has one; False: use the `transformers` modules unchanged. GPU only.
    graphs: iterations that replay a captured graph: none, decode-only iterations, or all that fit a graph. GPU only.
    attention: kernel for prompt chunks: flash-attn-4, our Triton kernel, or "auto" for the faster one that fits. GPU only.
    layers: number of layers of each pipeline stage; None: equal shares.
    tensor_parallel: ranks that share every layer of a stage. times_copies: see `StreamExecutor`.
    drafter: makes at most `Limits.max_drafts` drafts of a request, on the device; needed where that is above 0.
    """

    compiled: bool = False
    fused: bool = True
    graphs: Literal["off", "decode", "all"] = "all"
    attention: AttentionName = "auto"
    layers: tuple[int, ...] | None = None
    tensor_parallel: int = 1
    times_copies: bool = False
    drafter: Drafter | None = None
