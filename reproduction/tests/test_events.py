"""Missing events on a CPU, whose streams are threads; and the host's time divided among nested events of a profiler."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from cbatch import Server
from experiments.settings.backends import Cpu
from experiments.setup.presets import load_spec
from reproduction.bench.host_time import ALLOCATOR, DISPATCHER, DRIVER, MARK, USER, WAIT, divided, kind_of
from reproduction.bench.missing_events import FAULTS, SHOWS, late, server_of, tokens_of, wrong_share

BATCH, NEW, VOCABULARY = 4, 12, load_spec("tiny").vocab_size


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = server_of(Cpu(), "tiny", BATCH, NEW)
    tokens_of(server, BATCH, NEW, VOCABULARY)  # later stale inputs have the same shape
    yield server
    server.close()


@pytest.mark.parametrize("missing", FAULTS)
def test_a_missing_event_makes_tokens_wrong(missing: str, server: Server) -> None:
    executor: Any = server.executor
    expected = tokens_of(server, BATCH, NEW, VOCABULARY, asynchronous=False)
    with FAULTS[missing](executor), ExitStack() as stack:
        for name in SHOWS[missing]:
            [stream] = getattr(executor._streams, name)
            stack.enter_context(late(stream, lambda: time.sleep(0.01)))
        found = tokens_of(server, BATCH, NEW, VOCABULARY)
    assert wrong_share(found, expected) > 0.1 if missing != "none" else found == expected
    assert tokens_of(server, BATCH, NEW, VOCABULARY) == expected, "nothing of the fault is left"


def test_the_hosts_time_is_divided_among_kinds() -> None:
    """Real events of a profiler: 5 ms asleep are user logic, a product is the dispatcher's, new memory the allocator's; all add up."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(4):
            with torch.profiler.record_function(MARK):
                pass
            time.sleep(0.005)
            torch.ones(300, 300) @ torch.ones(300, 300)
    found = divided(profiler.events())
    host = found["host_ms"]
    assert sum(host.values()) == pytest.approx(found["profiled_ms"]) and host[USER] > 5 and host[DRIVER] == 0
    assert host[DISPATCHER] > host[ALLOCATOR] > 0 and found["lanes"][0] == (0, 2.0, USER)


def test_kinds_of_the_hosts_work() -> None:
    kinds = {
        "aten::mm": DISPATCHER,
        "aten::empty_strided": ALLOCATOR,
        "cudaMalloc": ALLOCATOR,
        "cudaLaunchKernel": DRIVER,
        "cuLaunchKernelEx": DRIVER,
        "cudaGraphLaunch": DRIVER,
        "cudaEventSynchronize": WAIT,
        "cumsum": DISPATCHER,
    }
    assert {name: kind_of(name) for name in kinds} == kinds
