"""Missing events on a CPU, whose streams are threads; and the host's time divided among nested events of a profiler."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from cbatch import Server
from experiments.settings.backends import Cpu
from experiments.settings.presets import load_spec
from reproduction.bench.host_time import ALLOCATOR, DISPATCHER, DRIVER, USER, WAIT, Span, innermost, kind_of, merged
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


def test_time_belongs_to_the_innermost_event() -> None:
    events = [Span(1, 5, "a"), Span(2, 3, "b"), Span(4, 5, "c"), Span(8, 12, "d"), Span(12, 13, "e")]
    inside = [Span(1, 2, "a"), Span(2, 3, "b"), Span(3, 4, "a"), Span(4, 5, "c")]
    assert [*innermost(events, 0, 10)] == [Span(0, 1, USER), *inside, Span(5, 8, USER), Span(8, 10, "d")]
    assert merged([Span(0, 1, "a"), Span(1, 2, "a"), Span(3, 4, "a")]) == [Span(0, 2, "a"), Span(3, 4, "a")]


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
