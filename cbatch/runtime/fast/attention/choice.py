"""Which attention a GPU runs: the fastest that its age, the packages, the model's type and the pages allow."""

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
    """An attention, and why the faster ones were passed over, one reason each."""

    attention: Attention
    passed_over: tuple[str, ...]

    def __str__(self) -> str:
        reasons = "; ".join(self.passed_over)
        return self.attention.name + (f" ({reasons})" if reasons else "")


class _UnfitError(Exception):
    """An attention cannot serve here; the message says why."""


class _Place(NamedTuple):
    """What decides: the model's type, head dimension and page size, and the GPU's compute capability."""

    dtype: str
    head_dim: int
    page_size: int
    capability: tuple[int, int]


def choose_attention(spec: ModelSpec, page_size: int, device: torch.device, wanted: str = "auto") -> Choice:
    """
    Args:
        page_size: tokens of a page of the KV cache.
        wanted: a name in `NAMES`; "auto" for the first that fits.

    Raises:
        ConfigError: the one wanted is unknown or does not fit, or none does; or the model's or the pages' size fits none.
    """
    _check_sizes(spec, page_size)
    properties = torch.cuda.get_device_properties(device)
    place = _Place(spec.dtype, spec.head_dim, page_size, (properties.major, properties.minor))
    decodes = Decodes(device)
    if wanted not in ("auto", *NAMES):
        raise ConfigError(f"backend.attention={wanted}: give auto, {', '.join(NAMES[:-1])} or {NAMES[-1]}")
    names = NAMES if wanted == "auto" else (wanted,)
    passed_over: list[str] = []
    for name in names:
        try:
            return Choice(_MAKERS[name](place, decodes), tuple(passed_over))
        except _UnfitError as reason:
            passed_over.append(f"no {name}: {reason}")
    raise ConfigError(
        f"backend.attention={wanted} cannot serve {spec.name} on {properties.name}: {'; '.join(passed_over)}"
    )


def _check_sizes(spec: ModelSpec, page_size: int) -> None:
    """Raise ConfigError for what our kernel of decodes, a part of every attention, does not take."""
    if spec.head_dim < LEAST_DIM or spec.head_dim.bit_count() > 1:
        raise ConfigError(
            f"model={spec.name}: attention on a GPU takes head dimensions that are powers of two, from {LEAST_DIM} "
            f"on; this one has {spec.head_dim}"
        )
    if page_size % BLOCK and page_size not in SMALL_PAGES:
        small = ", ".join(map(str, SMALL_PAGES))
        raise ConfigError(f"block_size={page_size}: attention on a GPU takes {small}, or a multiple of {BLOCK}")


def _flash4(place: _Place, decodes: Decodes) -> Attention:
    _require(place.dtype != "float32", "it computes 16-bit floats")
    _require(place.capability >= (9, 0), "it needs compute capability 9.0")
    try:
        from cbatch.runtime.fast.attention.flash4 import Flash4Chunks
    except ImportError:
        raise _UnfitError("flash-attn-4 is not installed") from None
    return SplitAttention(Flash4Chunks(), decodes)


def _flash2(place: _Place, decodes: Decodes) -> Attention:
    _require(place.dtype != "float32", "it computes 16-bit floats")
    _require(place.capability >= (8, 0), "it needs compute capability 8.0")
    try:
        from cbatch.runtime.fast.attention.flash2 import PAGE_MULTIPLE, Flash2Attention
    except ImportError:
        raise _UnfitError("flash-attn is not installed") from None
    _require(place.page_size % PAGE_MULTIPLE == 0, f"it needs block_size={PAGE_MULTIPLE}")
    return DecodeAttention(Flash2Attention(), decodes)


def _varlen(place: _Place, decodes: Decodes) -> Attention:
    _require(place.dtype != "float32", "it computes 16-bit floats")
    _require(place.capability >= (8, 0), "it needs compute capability 8.0")
    try:
        from cbatch.runtime.fast.attention.varlen import PAGE_MULTIPLE, VarlenAttention, takes_pages
    except ImportError:
        raise _UnfitError("this PyTorch has no varlen_attn") from None
    _require(takes_pages(), "this PyTorch's varlen_attn takes no pages")
    _require(place.page_size % PAGE_MULTIPLE == 0, f"it needs block_size={PAGE_MULTIPLE}")
    return DecodeAttention(VarlenAttention(), decodes)


def _triton(place: _Place, decodes: Decodes) -> Attention:
    return SplitAttention(TritonChunks(dependent=place.capability >= (9, 0)), decodes)


def _require(fits: bool, otherwise: str) -> None:
    if not fits:
        raise _UnfitError(otherwise)


_MAKERS: dict[str, Callable[[_Place, Decodes], Attention]] = {
    "flash4": _flash4,
    "flash2": _flash2,
    "varlen": _varlen,
    "triton": _triton,
}

NAMES = tuple(_MAKERS)
