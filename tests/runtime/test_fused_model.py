"""The fused model on a CPU, its kernels replaced by plain PyTorch: it reads every weight, or `can_fuse` says no."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from test_checkpoint_settings import COMPUTED, OF_FAMILIES, save
from tiny_models import CPU
from torch.nn.functional import linear, silu

from cbatch.kv import KVSize
from cbatch.model.checkpoint import CHECKPOINT_FAMILIES, spec_from_checkpoint
from cbatch.runtime.attention import PagedCache, ReferenceAttention
from cbatch.runtime.batch import Extents, Shape, device_views
from cbatch.runtime.gpu.ranks import finish
from cbatch.runtime.model import PagedModel
from cbatch.runtime.weights import can_fuse, load_model

CASES = [(family, name) for family in CHECKPOINT_FAMILIES for name in OF_FAMILIES[family]]
CASES += [("mistral", "another activation"), ("qwen2", "tied"), ("qwen3", "another activation"), ("llama", "yarn")]
NOT_FUSED = {"biases", "biases of the MLP", "another activation"}


class Product:
    def __init__(self, weight: torch.Tensor, processors: int, *, gated: bool = False, **_: Any) -> None:
        self.weight, self.gated = weight, gated

    def __call__(self, x: torch.Tensor, meeting: object = None) -> torch.Tensor:
        out = linear(x, self.weight)
        gates, ups = out.chunk(2, dim=-1)
        return (silu(gates) * ups if self.gated else out)[None]

    def into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        out.copy_(linear(x, self.weight))


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def add_norm(parts: Any, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, **_: Any) -> torch.Tensor:
    if parts is not None:
        residual += parts.sum(0)
    return norm(residual, weight, epsilon)


def rotate_and_store(
    parts: torch.Tensor,
    rotations: torch.Tensor,
    positions: torch.Tensor,
    indices: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_heads: int,
    *,
    bias: torch.Tensor | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
    **_: Any,
) -> torch.Tensor:
    *_, kv_heads, dim = keys.shape
    joined = parts.sum(0) + (0 if bias is None else bias)
    query, key, value = joined.unflatten(-1, (-1, dim)).split([num_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        query, key = norm(query, norms[0], epsilon), norm(key, norms[1], epsilon)
    cosine, sine = rotations[positions.long()][:, :, None].unbind(1)  # [tokens, 1, dim / 2]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)

    keys.flatten(0, 1)[indices.long()] = rotate(key)
    values.flatten(0, 1)[indices.long()] = value
    return rotate(query)


@pytest.fixture
def fused_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the fused model; modules with kernels cannot be imported without Triton."""
    plain = {
        "fast.linear": {"Product": Product},
        "fast.fused_ops": {"add_norm": add_norm, "rotate_and_store": rotate_and_store},
    }
    for name in ("fast.linear", "fast.fused_ops", "fast.argmax", "gpu.exchange", "gpu.peers"):
        monkeypatch.setitem(sys.modules, f"cbatch.runtime.{name}", MagicMock(**plain.get(name, {})))
    properties = SimpleNamespace(major=8, multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    module = import_module("cbatch.runtime.fast.fused_model")
    monkeypatch.setattr(module, "can_fuse", lambda spec: True)
    yield module
    del sys.modules[module.__name__]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_its_logits_are_those_of_the_modules(family: str, name: str, fused_model: Any, tmp_path: Path) -> None:
    save(family, {**(COMPUTED | OF_FAMILIES[family])[name], "torch_dtype": "float64"}, tmp_path)
    spec = spec_from_checkpoint(tmp_path)
    assert can_fuse(spec) == (name not in NOT_FUSED)
    tokens, shape = torch.arange(20, dtype=torch.int32), Shape(20, 1, 2)
    batch = device_views(torch.zeros(shape.size, dtype=torch.int32), shape)
    batch.query_starts[1] = batch.context_lens[0] = 20
    batch.block_tables[0, 1] = 1
    for field in (batch.positions, batch.kv_indices):
        field.copy_(torch.arange(20))
    weights = load_model(spec, CPU)
    caches = [PagedCache(spec, KVSize(2, 16), CPU) for _ in range(2)]
    with torch.inference_mode():
        paged = PagedModel(weights, caches[0], ReferenceAttention())
        expected = finish(paged.steps(tokens, batch, Extents(20, 20, 1))).clone()
        fused = fused_model.FusedModel(weights, spec, caches[1], ReferenceAttention(), max_rows=1, max_positions=20)
        got = fused(tokens, batch, Extents(20, 20, 1))
    equal = torch.allclose(got.double(), expected, atol=1e-4)
    assert equal == can_fuse(spec), "refused for no reason" if equal else "a weight or setting is not read"
