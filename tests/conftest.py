"""Settings of every test: hypothesis draws the same examples in every run, and a slow machine fails none of them."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("cbatch", derandomize=True, deadline=None, database=None)
settings.load_profile("cbatch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--schedules", type=int, default=240, help="random schedules to draw (test_random_schedules.py)")
    parser.addoption("--fuzz", type=int, default=320, help="inputs to draw (test_fuzz.py)")
    parser.addoption("--draw", type=int, default=0, help="another number draws others, of schedules and inputs")
    parser.addoption("--replay", metavar="BLOB", help="a failing schedule again, as its failure printed it")
    parser.addoption("--record", metavar="FOLDER", help="show progress, and write what was found under this folder")


@pytest.fixture
def num_schedules(pytestconfig: pytest.Config) -> int:
    number: int = pytestconfig.getoption("--schedules")
    return number
