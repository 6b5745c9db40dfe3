"""What goes wrong without events: the share of wrong tokens by the event that is missing, on purpose, on a GPU.

Every iteration has the same shape, one token per request in one block, so that stale inputs are those of an earlier iteration and no kernel
leaves its memory. The tokens are compared with those of the same requests under all events. Races do not always show: each fault also runs
with a stream whose operations begin late, which changes no token while all events are there.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch

from cbatch import Limits, Server
from cbatch.runtime.batch import Work, host_views
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.options import Options
from cbatch.runtime.slots import StageSlot
from experiments.settings.backends import Cpu, Cuda
from experiments.settings.command_line import Count
from experiments.setup.presets import load_spec
from experiments.setup.servers import equal_requests, real_server, release_memory
from experiments.store.provenance import write_benchmark
from policies.prefill_first import PrefillFirst
from reproduction import BENCH, RESULTS

Tokens = list[list[int]]
Graphs = Literal["off", "decode"]
GRAPHS: tuple[Graphs, ...] = ("off", "decode")


def deaf(stream: Any) -> AbstractContextManager[Any]:
    return patch.object(stream, "wait", lambda event: None)


@contextmanager
def downloading_early(executor: StreamExecutor) -> Iterator[None]:
    """Copies out without waiting for the iteration. The host still waits for both, since it reads when the iteration ended."""

    def synchronize(slot: Any, inner: Callable[[], None]) -> None:
        inner()
        slot.stages[-1].computed.synchronize()

    with ExitStack() as stack:
        stack.enter_context(deaf(executor._streams.d2h))
        for slot in executor._slots:
            wait = partial(synchronize, slot, slot.downloaded.synchronize)
            stack.enter_context(patch.object(slot.downloaded, "synchronize", wait))
        yield


@contextmanager
def overwriting(executor: StreamExecutor) -> Iterator[None]:
    """Copies in to the other slot as well, without waiting for the iteration that computes there: as if there was one slot."""
    stages = [slot.stages[0] for slot in executor._slots]

    def upload(here: StageSlot, other: StageSlot, work: Work) -> None:
        for stage in (other, here):
            stage.ranks[0].device[: work.shape.size].copy_(here.host[: work.shape.size], non_blocking=True)

    with ExitStack() as stack:
        for here, other in zip(stages, reversed(stages), strict=True):
            stack.enter_context(patch.object(here, "upload", partial(upload, here, other)))
        yield


@contextmanager
def without_carry(executor: StreamExecutor) -> Iterator[None]:
    """Leaves the placeholder in each input whose token is still on the device."""

    def pack(slot: Any, inner: Any, step: Any, shape: Any) -> Work:
        work: Work = inner(step, shape)
        host_views(slot.host_array, shape).carry[:] = 0
        return work

    with ExitStack() as stack:
        for slot in executor._slots:
            stack.enter_context(patch.object(slot, "pack", partial(pack, slot, slot.pack)))
        yield


FAULTS: dict[str, Callable[[StreamExecutor], AbstractContextManager[Any]]] = {
    "none": lambda executor: nullcontext(),
    "h2d before compute": lambda executor: deaf(executor._streams.compute[0]),
    "compute before d2h": downloading_early,
    "compute before reuse of a slot": overwriting,
    "carry-over": without_carry,
}
SHOWS = {
    "none": ("h2d", "compute"),
    "h2d before compute": ("h2d",),
    "compute before d2h": ("compute",),
    "compute before reuse of a slot": ("compute",),
    "carry-over": (),
}
"""The streams that begin late in tests: with them each fault shows, always."""


def late(stream: Any, wait: Callable[[], object]) -> AbstractContextManager[Any]:
    """Runs `wait` in the stream before each of its operations."""
    return patch.object(stream, "run", lambda operation, run=stream.run: run(lambda: (wait(), operation())[1]))


def tokens_of(server: Server, batch: int, new: int, vocabulary: int, asynchronous: bool = True) -> Tokens:
    """Returns the tokens of each request. Prompts have one token, so that iterations are alike."""
    requests = equal_requests(batch, 1, new, vocabulary)
    server.serve(PrefillFirst(), requests, asynchronous=asynchronous)
    return [request.output for request in requests]


def wrong_share(tokens: Tokens, expected: Tokens) -> float:
    """Returns the share of tokens that differ from those at the same place."""
    return float((np.array(tokens) != np.array(expected)).mean())


def server_of(backend: Cpu | Cuda, model: str, batch: int, new: int, graphs: Graphs = "off") -> Server:
    return real_server(backend, load_spec(model), Limits(batch, batch, new + 1), Options(graphs=graphs))


def cycles_per_ms() -> float:
    """Returns how many cycles `torch.cuda._sleep` takes for a millisecond."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    begin.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    end.synchronize()
    return 1e8 / float(begin.elapsed_time(end))


def main(
    model: str = "llama-3.1-8b", batch: Count = 32, new: Count = 32, delay: float = 10.0, folder: str = RESULTS
) -> None:
    """Measures, prints and writes events.json. delay: milliseconds by which operations of a late stream begin late."""
    spec, rows = load_spec(model), list[dict[str, Any]]()
    sleep = partial(torch.cuda._sleep, int(delay * cycles_per_ms()))
    for graphs in GRAPHS:
        server = server_of(Cuda(), model, batch, new, graphs)
        executor: Any = server.executor
        streams = {"no stream": [], "h2d": executor._streams.h2d, "compute": executor._streams.compute}
        tokens_of(server, batch, new, spec.vocab_size)
        expected = tokens_of(server, batch, new, spec.vocab_size, asynchronous=False)
        repeated = 1 - wrong_share([row[2:] for row in expected], [row[:-2] for row in expected])
        for loop, slow, fault in product(("sync", "async"), streams, FAULTS):
            with FAULTS[fault](executor), ExitStack() as stack:
                for stream in streams[slow]:
                    stack.enter_context(late(stream, sleep))
                found = tokens_of(server, batch, new, spec.vocab_size, loop == "async")
            torch.cuda.synchronize()
            share = wrong_share(found, expected)
            rows.append({"graphs": graphs, "loop": loop, "late": slow, "missing": fault, "wrong_share": share})
            print(f"  graphs={graphs:6} {loop:5} late: {slow:9} missing: {fault:31} {share:7.2%}", flush=True)
        print(f"  tokens that equal the one two iterations before: {repeated:.2%}", flush=True)
        server.close()
        del server, executor, streams
        release_memory()
    about = {"model": spec.name, "batch": batch, "new": new, "delay_ms": delay, "equal_after_two": repeated}
    content = {**about, "figures": rows}
    print(f"written: {write_benchmark('events', torch.cuda.get_device_name(), content, folder, BENCH)}")
