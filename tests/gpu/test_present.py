"""Says why there is nothing else in this folder where there is no GPU."""

from __future__ import annotations

import pytest
import torch


def test_there_is_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no NVIDIA GPU, which all tests in tests/gpu need")
