"""How an executor of real tokens computes. Imports no torch, so settings can use it."""

from dataclasses import dataclass
from typing import Literal

AttentionName = Literal["auto", "flash4", "triton"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `cpu.build` and `gpu.build`.

    compiled: compile the layers of `transformers`' modules by `torch.compile`, instead of the fused model.
    fused: use the fused model where there is one; False: `transformers`' modules as they are. GPU only.
    graphs: iterations that replay a captured graph: none, those without prompts, or all that fit one. GPU only.
    attention: the kernel for prompt chunks: flash-attn-4, our Triton kernel, or "auto": the faster one that fits. GPU only.
    layers: number of layers of each pipeline stage; None: equally many.
    tensor_parallel: ranks that share every layer of a stage. times_copies: see `StreamExecutor`.
    """

    compiled: bool = False
    fused: bool = True
    graphs: Literal["off", "decode", "all"] = "all"
    attention: AttentionName = "auto"
    layers: tuple[int, ...] | None = None
    tensor_parallel: int = 1
    times_copies: bool = False
