"""Settings of all tests: hypothesis draws the same examples in every run, without deadlines."""

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.internal.conjecture import providers

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: tests share the cores, and their matrices are small

gc.set_threshold(1_000_000)  # each full collection would traverse all of torch

phases = set(Phase) - {Phase.explain}  # it traces every line while an example is shrunk
settings.register_profile("cbatch", derandomize=True, deadline=None, database=None, phases=phases)
settings.load_profile("cbatch")
# else it would read the constants of all modules loaded so far, in seconds, and draw others after other tests
providers._get_local_constants = lambda: providers._local_constants


def pytest_configure(config: pytest.Config) -> None:
    """Processes of `pytest -n` share a folder."""
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", 0):
        shared = TemporaryDirectory(prefix="tests-")
        config.add_cleanup(shared.cleanup)
        os.environ["TESTS_KEEP"] = shared.name
    if folder := config.getoption("--vllm"):
        import vllm_sources

        vllm_sources.load(Path(folder))


class LeftOut(pytest.Module):
    """A file without tests."""

    def collect(self) -> list[Any]:
        return []


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """The tests of vLLM import its sources: without them they are left out, also where a command line names their file."""
    if not module_path.name.startswith("test_vllm") or parent.config.getoption("--vllm"):
        return None
    left_out: pytest.Module = LeftOut.from_parent(parent, path=module_path)
    return left_out


MOST = 4_000_000  # blocks of memory, about 400 MB, that tests may leave
kept = [0]  # blocks after the latest collection of all


@pytest.fixture(autouse=True)
def _tests_are_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test leaves no module, whose name another may have, and no figure: pyplot warns of more than 20.

    What earlier tests have left is collected only once it is much: a collection in a test would traverse it and torch, which takes a second.
    """
    if sys.getallocatedblocks() > kept[0] + MOST:
        gc.unfreeze()
        gc.collect()
        kept[0] = sys.getallocatedblocks()
    gc.freeze()
    last = next(reversed(sys.modules))
    yield
    for name in [*takewhile(lambda name: name != last, reversed(sys.modules))]:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path_factory.getbasetemp()):
            del sys.modules[name]
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


@pytest.hookimpl(trylast=True)  # after the marks have left out others
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps at most `--cases` of each test, at equal distances."""
    if not (most := config.getoption("--cases")):
        return
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept = {some[place * len(some) // most] for some in cases.values() for place in range(most)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = filter(kept.__contains__, items)


def pytest_collection_finish() -> None:
    """No later collection traverses what was imported."""
    kept[0] = sys.getallocatedblocks()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """A process that ends need not look for garbage once more."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workloads", type=int, default=5, help="of each steady policy (test_leaps.py)")
    parser.addoption("--cancellations", type=int, default=5, help="of each policy and mode (test_cancellations.py)")
    parser.addoption("--sessions", type=int, default=10, help="to draw (test_sessions.py, test_session_policies.py)")
    parser.addoption(
        "--schedules",
        type=int,
        default=24,
        help="random schedules to draw (test_random_schedules.py, test_moves.py, test_transfers.py)",
    )
    parser.addoption("--repetitions", type=int, default=6, help="of each interval (test_coverage.py)")
    parser.addoption("--instances", type=int, default=16, help="tiny instances to solve exactly (test_bounds.py)")
    parser.addoption("--fuzz", type=int, default=40, help="inputs to draw (test_fuzz.py)")
    parser.addoption("--runs", type=int, default=8, help="of vLLM's scheduler, for each mode (test_vllm_fuzz.py)")
    parser.addoption("--cases", type=int, default=0, help="at most, of each test with parameters; 0: all")
    parser.addoption("--slow", action="store_true", help="sweeps by Ray and submitit, notebooks, all documents, too")
    parser.addoption("--vllm", metavar="FOLDER", help="with a wheel of vLLM, without which test_vllm_*.py are left out")
    parser.addoption(
        "--compiler", default="eager", help="torch.compile's backend, such as inductor (test_runtime_model.py)"
    )
    parser.addoption("--draw", type=int, default=0, help="another number draws others, of schedules and inputs")
    parser.addoption("--replay", metavar="BLOB", help="a failing schedule again, as its failure printed it")
    parser.addoption("--golden", default="check", choices=("check", "write"), help="check or write hashes (golden/)")


def _value_of(option: str) -> Any:
    """Returns a fixture with the value of an option of the command line."""
    return pytest.fixture(lambda pytestconfig: pytestconfig.getoption(option))


num_workloads, num_cancellations, num_repetitions, num_sessions = map(
    _value_of, ("--workloads", "--cancellations", "--repetitions", "--sessions")
)
num_runs, golden, draw = map(_value_of, ("--runs", "--golden", "--draw"))
