"""Everything in this folder needs an NVIDIA GPU; without one, one test is skipped and says so."""

import fcntl
from collections.abc import Generator
from pathlib import Path
from tempfile import gettempdir

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_gpu_*.py"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Keeps other processes of `pytest -n`, and what their modules' fixtures build, from the GPUs during tests marked `alone`.

    Memory that a test has left unused is given back: twelve processes that keep 12 GB each leave others none.
    """
    with (Path(gettempdir()) / "cbatch-gpu-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        outcome = yield
        torch.cuda.empty_cache()
        return outcome


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Random numbers of a test do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")
