"""Settings of every test: hypothesis draws the same examples in every run, and a slow machine fails none of them."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("cbatch", derandomize=True, deadline=None, database=None)
settings.load_profile("cbatch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--schedules", type=int, default=240, help="random schedules to draw (test_random_schedules.py)")


@pytest.fixture
def num_schedules(pytestconfig: pytest.Config) -> int:
    number: int = pytestconfig.getoption("--schedules")
    return number
