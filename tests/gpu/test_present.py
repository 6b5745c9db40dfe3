"""Without a GPU, the one test of this folder: its skip says why the others are missing."""

import pytest
import torch


def test_there_is_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no NVIDIA GPU, which all tests in tests/gpu need")
