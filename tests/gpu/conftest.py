"""Everything in this folder needs an NVIDIA GPU; without one, one test is skipped and says so."""

import fcntl
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_gpu_*.py"]


@pytest.fixture(autouse=True)
def gpu_lock(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keeps other processes of `pytest -n` from the GPUs during tests marked `alone`, which measure memory or time."""
    with (Path(gettempdir()) / "cbatch-gpu-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH)
        yield


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Random numbers of a test do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")
