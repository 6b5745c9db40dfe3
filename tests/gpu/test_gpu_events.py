"""Events order the streams of a GPU: without one of them tokens are wrong, and no kernel runs on the default stream."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, get_args

import pytest
import torch
from gpu_models import SLICE, TWO_GPUS
from schedules import UnitCost

from cbatch import Limits, Server
from cbatch.kv import KVSize
from cbatch.runtime.gpu import build as gpu
from cbatch.runtime.options import Options
from experiments.profile.kernels import _detach_cupti_at_exit
from reproduction.bench.missing_events import FAULTS, SHOWS, Graphs, late, tokens_of, wrong_share

BATCH, NEW, BLOCK_SIZE = 8, 15, 128
SLEEP = partial(torch.cuda._sleep, 40_000_000)
"""About 20 ms: longer than a busy host takes to launch six layers without a graph."""


def build_server(graphs: Any, num_stages: int = 1) -> Server:
    limits = Limits(BATCH, BATCH, NEW + 1, tile=1, num_stages=num_stages)
    kv = KVSize(4 * BATCH, BLOCK_SIZE)
    return Server(gpu.build(SLICE, limits, kv, Options(graphs=graphs)), limits, UnitCost(), kv)


@pytest.fixture(scope="module", params=get_args(Graphs))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = build_server(request.param)
    tokens_of(server, BATCH, NEW, SLICE.vocab_size)  # later stale inputs have the same shape
    yield server
    server.close()


@pytest.mark.parametrize("missing", FAULTS)
def test_without_an_event_tokens_are_wrong(missing: str, server: Server) -> None:
    executor: Any = server.executor
    expected = tokens_of(server, BATCH, NEW, SLICE.vocab_size, asynchronous=False)
    with FAULTS[missing](executor), ExitStack() as stack:
        for name in SHOWS[missing]:
            [stream] = getattr(executor._streams, name)
            stack.enter_context(late(stream, SLEEP))
        found = tokens_of(server, BATCH, NEW, SLICE.vocab_size)
    torch.cuda.synchronize()
    share = wrong_share(found, expected)
    assert share > 0.5 if missing != "none" else share == 0


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=TWO_GPUS)])
@pytest.mark.parametrize("graphs", get_args(Graphs))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_kernel_runs_on_the_default_stream(asynchronous: bool, graphs: Graphs, num_stages: int) -> None:
    """Each GPU's first kernel in the trace is put on the default stream, and shows that stream's number."""
    server = build_server(graphs, num_stages)
    marks = [torch.zeros(1, device=f"cuda:{index}") for index in range(num_stages)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for mark in marks:
            mark.add_(1)
            torch.cuda.synchronize(mark.device)
        tokens_of(server, BATCH, NEW, SLICE.vocab_size, asynchronous)
        for mark in marks:
            torch.cuda.synchronize(mark.device)
    _detach_cupti_at_exit()
    server.close()
    events = sorted(profiler.events() or [], key=lambda event: event.time_range.start)
    for mark in marks:
        of_device = [
            (event.device_resource_id, event.name)
            for event in events
            if event.device_type == torch.profiler.DeviceType.CUDA and event.device_index == mark.device.index
        ]
        (default, _), *others = of_device
        assert len({stream for stream, _ in others}) >= 2 and len(others) > 100, (
            "compute and at least a stream of copies"
        )
        assert [name for stream, name in others if stream == default] == []
