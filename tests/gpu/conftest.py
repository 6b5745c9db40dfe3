"""Everything in this folder needs an NVIDIA GPU; without one, one test is skipped and says so."""

from pathlib import Path

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_gpu_*.py"]


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Random numbers of a test do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")
