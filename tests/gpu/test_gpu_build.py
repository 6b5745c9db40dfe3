"""Building a GPU executor: what is chosen, what it costs, and the errors."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_models import BLOCK_SIZE, CUDA, LARGE, TINY_LLAMA

from cbatch import Limits
from cbatch.errors import CapacityError, ConfigError
from cbatch.kv import KVSize
from cbatch.runtime.fast.attention.choice import choose_attention
from cbatch.runtime.fast.quack_gemm import why_not_quack
from cbatch.runtime.gpu import build as gpu
from experiments.setup.servers import release_memory


def test_too_large_a_cache_says_what_to_lower() -> None:
    with pytest.raises(CapacityError, match=r"needs 16\.1 GB for weights, .* lower kv_tokens to \d+"):
        gpu.build(LARGE, Limits(32, 8192, 4096), KVSize(100_000, 128))


def test_float32_runs_on_our_own_kernel_and_says_why() -> None:
    choice = choose_attention(TINY_LLAMA, BLOCK_SIZE, CUDA)
    assert choice.attention.name.startswith("triton")
    assert "no flash4: it computes 16-bit floats" in str(choice)
    with pytest.raises(ConfigError, match=r"backend\.attention=flash4 cannot serve gpu-llama .* 16-bit"):
        choose_attention(TINY_LLAMA, BLOCK_SIZE, CUDA, "flash4")


@pytest.mark.parametrize(("asked", "name"), [("triton", "triton"), ("auto", "flash-attn-4")])
def test_attention_is_what_was_asked_for_or_flash4_where_it_is_installed(asked: Any, name: str) -> None:
    if asked == "auto":
        pytest.importorskip("flash_attn.cute")
    choice = choose_attention(LARGE, 128, CUDA, asked)
    assert choice.attention.name.startswith(name)
    assert not choice.reason


def test_sizes_that_no_kernel_takes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"block_size=48: attention on a GPU takes 16, 32, or a multiple of 64"):
        choose_attention(TINY_LLAMA, 48, CUDA)
    with pytest.raises(ConfigError, match=r"model=gpu-llama: .* this one has 80"):
        choose_attention(replace(TINY_LLAMA, head_dim=80), BLOCK_SIZE, CUDA)
    with pytest.raises(ConfigError, match=r"model=gpu-llama: kernels on a GPU take .*; give model.dtype=float32"):
        choose_attention(replace(TINY_LLAMA, dtype="float64"), BLOCK_SIZE, CUDA)


@pytest.mark.skipif(torch.cuda.get_device_capability(CUDA)[0] != 9, reason="other GPUs have other reasons")
def test_an_optional_kernel_that_cannot_be_loaded_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError(f"{name}\nnot here")

    monkeypatch.setattr("cbatch.runtime.fast.quack_gemm.import_module", fail)
    monkeypatch.setattr("cbatch.runtime.fast.attention.choice.import_module", fail)
    assert why_not_quack(LARGE, CUDA) == "RuntimeError: quack.gemm_interface"
    assert choose_attention(LARGE, 128, CUDA).reason == "flash-attn-4 cannot be loaded: RuntimeError: flash_attn.cute"


FAILING_CAPTURE = """
from cbatch import Limits
from cbatch.kv import KVSize
from cbatch.model import ModelSpec
from cbatch.runtime.gpu import build as gpu
from cbatch.runtime.fast.fused_model import FusedModel

def look(self, logits, out):
    yield
    out[:] = int(logits.argmax())  # reads the device: no capture allows that

FusedModel.choose = look
gpu.build(ModelSpec("small", "llama", 1, 64, 4, 2, 16, 128, 96, 512, "float32"), Limits(4, 256, 64), KVSize(9, 16))
"""


def test_a_failed_capture_names_the_shape() -> None:
    """In its own process: PyTorch's random number generator does not survive a failed capture."""
    process = subprocess.run([sys.executable, "-c", FAILING_CAPTURE], capture_output=True, text=True, check=False)
    assert "ModelError: a CUDA graph of 256 tokens and 4 requests cannot be captured" in process.stderr
    assert process.stderr.strip().endswith("set runtime.graphs=off")


@pytest.mark.alone
def test_graphs_of_all_shapes_take_little_more_memory_than_the_largest() -> None:
    """A second pool, for graphs of few tokens, takes PyTorch's smallest segments, and the driver a third of a MiB for a graph's kernels.

    Kernels are compiled before: on a machine that has not run them yet that takes longer than the captures.
    """
    limits, kv = Limits(32, 2048, 4096), KVSize(64, 128)
    gpu.build(replace(LARGE, num_layers=1), limits, kv)
    release_memory()
    executor = gpu.build(LARGE, limits, kv)
    report = executor.iteration.report
    assert report.num_graphs == 2 * len({shape for shape, _ in executor.iteration.graphs})
    assert report.bytes - report.first_bytes <= (20 + 2 + 0.5 * report.num_graphs) * 2**20, report
    assert report.seconds < 10, report
