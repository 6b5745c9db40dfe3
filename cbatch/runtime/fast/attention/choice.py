"""Chooses a GPU's attention: the fastest that its generation, packages, the model's type and the block size allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from cbatch.errors import ConfigError
from cbatch.model import ModelSpec
from cbatch.runtime.attention import Attention
from cbatch.runtime.fast.attention.decode import DecodeAttention, SplitAttention
from cbatch.runtime.fast.attention.triton_blocks import BLOCK, LEAST_DIM, SMALL_PAGES
from cbatch.runtime.fast.attention.triton_chunks import TritonChunks
from cbatch.runtime.fast.attention.triton_decodes import Decodes


class Choice(NamedTuple):
    """An attention, and one reason for each faster one that was passed over."""

    attention: Attention
    passed_over: tuple[str, ...]

    def __str__(self) -> str:
        reasons = "; ".join(self.passed_over)
        return self.attention.name + (f" ({reasons})" if reasons else "")


class _UnfitError(Exception):
    """An attention cannot be used here; the message says why."""


class _Setting(NamedTuple):
    """What decides: the model's type and head dimension, the block size, and the GPU's compute capability."""

    dtype: str
    head_dim: int
    block_size: int
    capability: tuple[int, int]


def choose_attention(spec: ModelSpec, block_size: int, device: torch.device, wanted: str = "auto") -> Choice:
    """
    Args:
        block_size: tokens of a KV block.
        wanted: a name in `NAMES`; "auto" for the first that fits.

    Raises:
        ConfigError: the wanted one is unknown or does not fit, or none fits the model and the block size.
    """
    _check_sizes(spec, block_size)
    properties = torch.cuda.get_device_properties(device)
    setting = _Setting(spec.dtype, spec.head_dim, block_size, (properties.major, properties.minor))
    decodes = Decodes(device)
    if wanted not in ("auto", *NAMES):
        raise ConfigError(f"backend.attention={wanted}: give auto, {', '.join(NAMES[:-1])} or {NAMES[-1]}")
    names = NAMES if wanted == "auto" else (wanted,)
    passed_over: list[str] = []
    for name in names:
        try:
            return Choice(_MAKERS[name](setting, decodes), tuple(passed_over))
        except _UnfitError as reason:
            passed_over.append(f"no {name}: {reason}")
    raise ConfigError(
        f"backend.attention={wanted} cannot serve {spec.name} on {properties.name}: {'; '.join(passed_over)}"
    )


def _check_sizes(spec: ModelSpec, block_size: int) -> None:
    """Raise ConfigError for sizes that our decode kernel, a part of every attention, does not take."""
    if spec.head_dim < LEAST_DIM or spec.head_dim.bit_count() > 1:
        raise ConfigError(
            f"model={spec.name}: attention on a GPU takes head dimensions that are powers of two, from {LEAST_DIM} "
            f"on; this one has {spec.head_dim}"
        )
    if block_size % BLOCK and block_size not in SMALL_PAGES:
        small = ", ".join(map(str, SMALL_PAGES))
        raise ConfigError(f"block_size={block_size}: attention on a GPU takes {small}, or a multiple of {BLOCK}")


def _flash4(setting: _Setting, decodes: Decodes) -> Attention:
    _require(setting.dtype != "float32", "it computes 16-bit floats")
    _require(setting.capability >= (9, 0), "it needs compute capability 9.0")
    try:
        from cbatch.runtime.fast.attention.flash4 import Flash4Chunks
    except ImportError:
        raise _UnfitError("flash-attn-4 is not installed") from None
    return SplitAttention(Flash4Chunks(), decodes)


def _flash2(setting: _Setting, decodes: Decodes) -> Attention:
    _require(setting.dtype != "float32", "it computes 16-bit floats")
    _require(setting.capability >= (8, 0), "it needs compute capability 8.0")
    try:
        from cbatch.runtime.fast.attention.flash2 import PAGE_MULTIPLE, Flash2Attention
    except ImportError:
        raise _UnfitError("flash-attn is not installed") from None
    _require(setting.block_size % PAGE_MULTIPLE == 0, f"it needs block_size={PAGE_MULTIPLE}")
    return DecodeAttention(Flash2Attention(), decodes)


def _varlen(setting: _Setting, decodes: Decodes) -> Attention:
    _require(setting.dtype != "float32", "it computes 16-bit floats")
    _require(setting.capability >= (8, 0), "it needs compute capability 8.0")
    try:
        from cbatch.runtime.fast.attention.varlen import PAGE_MULTIPLE, VarlenAttention, takes_pages
    except ImportError:
        raise _UnfitError("this PyTorch has no varlen_attn") from None
    _require(takes_pages(), "this PyTorch's varlen_attn takes no pages")
    _require(setting.block_size % PAGE_MULTIPLE == 0, f"it needs block_size={PAGE_MULTIPLE}")
    return DecodeAttention(VarlenAttention(), decodes)


def _triton(setting: _Setting, decodes: Decodes) -> Attention:
    return SplitAttention(TritonChunks(dependent=setting.capability >= (9, 0)), decodes)


def _require(fits: bool, otherwise: str) -> None:
    if not fits:
        raise _UnfitError(otherwise)


_MAKERS: dict[str, Callable[[_Setting, Decodes], Attention]] = {
    "flash4": _flash4,
    "flash2": _flash2,
    "varlen": _varlen,
    "triton": _triton,
}

NAMES = tuple(_MAKERS)
