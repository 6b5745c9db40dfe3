"""Chooses a GPU's attention: our kernel for decodes; for chunks flash-attn-4 if it runs here, else our Triton kernel."""

from importlib import import_module
from typing import NamedTuple

import torch

from cbatch.errors import ConfigError
from cbatch.model import ModelSpec
from cbatch.runtime.fast.attention.decode import Chunks, SplitAttention
from cbatch.runtime.fast.attention.triton_blocks import BLOCK, LEAST_DIM, SMALL_PAGES
from cbatch.runtime.fast.attention.triton_chunks import TritonChunks
from cbatch.runtime.fast.attention.triton_decodes import Decodes
from cbatch.runtime.options import AttentionName


class Choice(NamedTuple):
    """The chosen attention, and the reason why flash-attn-4 was not chosen; empty if it was, or if it was not considered."""

    attention: SplitAttention
    reason: str = ""

    def __str__(self) -> str:
        return self.attention.name + (f" (no flash4: {self.reason})" if self.reason else "")


def choose_attention(
    spec: ModelSpec, block_size: int, device: torch.device, wanted: AttentionName = "auto", *, drafts: bool = False
) -> Choice:
    """Chooses an attention. drafts: see `Decodes`. Raises ConfigError if the wanted kernel does not fit, or if none fits the model and the KV block size."""
    _check_sizes(spec, block_size)
    properties = torch.cuda.get_device_properties(device)
    is_hopper = properties.major >= 9
    reason = "" if wanted == "triton" else _why_not_flash4(spec, is_hopper)
    if wanted == "flash4" and reason:
        raise ConfigError(f"backend.attention=flash4 cannot serve {spec.name} on {properties.name}: {reason}")
    chunks: Chunks
    if wanted == "triton" or reason:
        chunks = TritonChunks(dependent=is_hopper)
    else:
        from cbatch.runtime.fast.attention.flash4 import Flash4Chunks

        chunks = Flash4Chunks()
    return Choice(SplitAttention(chunks, Decodes(device, drafts=drafts)), reason)


def _check_sizes(spec: ModelSpec, block_size: int) -> None:
    """Raises ConfigError for sizes that our decode kernel, which every choice uses, does not support."""
    if spec.dtype == "float64":
        takes = "kernels on a GPU take floats of 16 and 32 bits"
        raise ConfigError(f"model={spec.name}: {takes}; give model.dtype=float32, or backend=cpu")
    if spec.head_dim < LEAST_DIM or spec.head_dim.bit_count() > 1:
        takes = f"attention on a GPU takes head dimensions that are powers of two, from {LEAST_DIM} on"
        raise ConfigError(f"model={spec.name}: {takes}; this one has {spec.head_dim}")
    if block_size % BLOCK and block_size not in SMALL_PAGES:
        small = ", ".join(map(str, SMALL_PAGES))
        raise ConfigError(f"block_size={block_size}: attention on a GPU takes {small}, or a multiple of {BLOCK}")


def _why_not_flash4(spec: ModelSpec, is_hopper: bool) -> str:
    if spec.dtype == "float32":
        return "it computes 16-bit floats"
    if not is_hopper:
        return "it needs compute capability 9.0"
    try:
        import_module("flash_attn.cute")
    except ImportError:
        return "flash-attn-4 is not installed"
    except Exception as error:  # its libraries may raise any exception
        return f"flash-attn-4 cannot be loaded: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""
