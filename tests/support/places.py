"""Where the repository keeps what tests read."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "reproduction" / "results"
SHARED = ROOT.parent / "shared"
"""Published traces and profiles, which a clone may lack."""


def published(name: str) -> str:
    """Returns the path of a published trace; skips the test if this machine lacks the file."""
    path = SHARED / "traces" / name
    if not path.exists():
        pytest.skip(f"the published trace {name} is not in {path.parent}")
    return str(path)


def file_of_test(name: str) -> Path:
    """Returns the path of a file of tests, of which each has a name of its own: test_kv -> tests/kv/test_kv.py."""
    [path] = [*ROOT.glob(f"tests/*/{name}.py"), *ROOT.glob(f"reproduction/tests/{name}.py")]
    return path
