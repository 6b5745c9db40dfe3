"""Tests of the tests: each rule of the runtime is broken in turn, and one of two watchers must notice.

    checker     checked streams, all work done in order and at once: a race is reported, harmful or not
    adversary   streams in any order: tokens come out wrong, or the accounts do not add up

Neither may notice anything in the unbroken runtime.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from any_order import any_order
from rig import Rig, stress

from cbatch.errors import RaceError
from cbatch.runtime import slots as slots_module
from cbatch.runtime.batch import Bounds, Work
from cbatch.runtime.checks.races import checked
from cbatch.runtime.slots import Slot
from cbatch.runtime.streams import Streams

NUM_RUNS = 8
NUM_GRAPH_RUNS = 1
"""Runs, every other one sync, in one of which each mutant must be noticed; one with graphs, which take long to capture."""

CHECKER, ADVERSARY = "checker", "adversary"


def in_order(_: random.Random) -> Streams:
    """Checked streams that run every operation at once."""
    return checked(any_order(random.Random(0), every=0))


WATCHERS: dict[str, Callable[[random.Random], Streams]] = {CHECKER: in_order, ADVERSARY: any_order}


# -- what is broken ---------------------------------------------------------------------------------------------------

Break = Callable[[Rig, pytest.MonkeyPatch], object]


def deaf(rig: Rig, stream: str) -> None:
    """The stream ignores waits."""
    getattr(rig.streams, stream).wait = lambda event: None


def early_record(rig: Rig, stream: str) -> None:
    """The stream's events are recorded before the operation that they stand for."""
    broken: Any = getattr(rig.streams, stream)
    run, record, held = broken.run, broken.record, []
    broken.run = lambda operation: held.append(partial(run, operation))
    broken.record = lambda event: (record(event), held and held.pop()())


def other_event(rig: Rig, stream: str, name: str) -> None:
    """The stream waits for the event of the other slot."""
    first, second = (getattr(slot, name) for slot in rig.slots)
    broken: Any = getattr(rig.streams, stream)
    wait, other = broken.wait, {first: second, second: first}
    broken.wait = lambda event: wait(other[event])


def share(rig: Rig, *names: str) -> None:
    """Both slots have the same buffer."""
    for name in names:
        setattr(rig.slots[1], name, getattr(rig.slots[0], name))


class NeverInUse(Slot):
    """A slot that lets itself be taken again at any time."""

    in_use = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]


def one_slot(rig: Rig) -> None:
    rig.executor._slots = [rig.slots[0]] * 2


def deeper(rig: Rig) -> None:
    """The engine keeps two iterations in flight while it plans a third."""
    rig.engine._depth = 2


def host_does_not_wait(rig: Rig) -> None:
    for slot in rig.slots:
        slot.downloaded.synchronize = lambda: None


def swap(rig: Rig, name: str) -> None:
    """Each slot has what the other should have."""
    first, second = (getattr(slot, name) for slot in rig.slots)
    for slot, other in zip(rig.slots, (second, first), strict=True):
        setattr(slot, name, other)


def unguarded(rig: Rig) -> None:
    for slot in rig.slots:
        slot.__class__ = NeverInUse


def as_if_landed(rig: Rig, method: str) -> None:
    """While the state's method runs, it believes that no iteration in flight uses the request."""
    state: Any = rig.engine.state
    until, inner = state.in_flight_until, getattr(state, method)

    def broken(*args: Any) -> Any:
        state.in_flight_until = lambda request: None
        try:
            return inner(*args)
        finally:
            state.in_flight_until = until

    setattr(state, method, broken)


def blocks_at_once(rig: Rig) -> None:
    """The blocks of an ended request, but not its row, are free at once."""
    pool, state = rig.engine.state.pool, rig.engine.state
    release, finished = pool.release, state._finished

    def broken(*args: Any) -> Any:
        pool.release = lambda row, after: release(row, None)  # type: ignore[method-assign]
        try:
            return finished(*args)
        finally:
            pool.release = release  # type: ignore[method-assign]

    state._finished = broken  # type: ignore[method-assign]


def retire_early(rig: Rig) -> None:
    """With an iteration, the blocks of the one after it are free too."""
    pool: Any = rig.engine.state.pool
    retire = pool.retire
    pool.retire = lambda iteration: (retire(iteration), retire(iteration + 1))


class Altered:
    """An iteration that computes from another source of carry-over."""

    def __init__(self, inner: Any, source: Callable[[Slot, torch.Tensor], torch.Tensor]) -> None:
        self.inner, self.source, self.shape = inner, source, inner.shape

    def __call__(self, slot: Slot, source: torch.Tensor, work: Work) -> None:
        self.inner(slot, self.source(slot, source), work)


def carry_from(rig: Rig, source: Callable[[Slot, torch.Tensor], torch.Tensor]) -> None:
    rig.executor._iteration = Altered(rig.iteration, source)


def after_packing(patch: pytest.MonkeyPatch, change: Callable[[Any, Any], object]) -> None:
    """Change the packed inputs; `change` gets the step and the fields."""
    pack = slots_module.pack
    patch.setattr(slots_module, "pack", lambda step, shape, out: (pack(step, shape, out), change(step, out)))


def pad_into_live_block(step: Any, packed: Any) -> None:
    """Padding writes to the first block of the batch's first request."""
    num_tokens = int(step.num_tokens.sum())
    block = int(step.pool.tables[step.rows[0], 0])
    packed.kv_indices[num_tokens:] = block * step.pool.block_size


def recaptured(rig: Rig, work: Callable[[Any], Work]) -> None:
    iteration: Any = rig.iteration
    iteration.work = work
    iteration.capture()


def swapped_graphs(rig: Rig) -> None:
    iteration: Any = rig.iteration
    iteration.graphs = {(shape, 1 - slot): graph for (shape, slot), graph in iteration.graphs.items()}


def ends_forgotten(rig: Rig) -> None:
    """A row does not remember that its request has ended."""
    table: Any = rig.engine.state.table
    close = table.close
    table.close = lambda request: (row := request.row, close(request), table.ended.__setitem__(row, False))


@dataclass(frozen=True)
class Mutant:
    """A broken runtime.

    fact: what no longer holds. by: who must notice. graphs: whether iterations are replayed.
    """

    fact: str
    by: tuple[str, ...]
    broken: Break
    graphs: bool = False


BOTH = (CHECKER, ADVERSARY)
MUTANTS = (
    Mutant("compute waits for uploaded", BOTH, lambda rig, patch: deaf(rig, "compute")),
    Mutant("d2h waits for computed", BOTH, lambda rig, patch: deaf(rig, "d2h")),
    Mutant("the host waits for downloaded", BOTH, lambda rig, patch: host_does_not_wait(rig)),
    Mutant("uploaded is recorded after the copy", BOTH, lambda rig, patch: early_record(rig, "h2d")),
    Mutant("computed is recorded after the sampling", BOTH, lambda rig, patch: early_record(rig, "compute")),
    Mutant("downloaded is recorded after the copy", BOTH, lambda rig, patch: early_record(rig, "d2h")),
    Mutant("compute waits for its own slot's upload", BOTH, lambda rig, patch: other_event(rig, "compute", "uploaded")),
    Mutant("d2h waits for its own slot's sampling", BOTH, lambda rig, patch: other_event(rig, "d2h", "computed")),
    Mutant("each iteration in flight has its own slot", BOTH, lambda rig, patch: (unguarded(rig), one_slot(rig))),
    Mutant("one iteration is in flight beside the next", BOTH, lambda rig, patch: (unguarded(rig), deeper(rig))),
    Mutant("a slot has a pinned buffer of its own", BOTH, lambda rig, patch: share(rig, "host", "host_array")),
    Mutant("a slot has a device buffer of its own", BOTH, lambda rig, patch: share(rig, "device")),
    Mutant("a slot's sampled tokens are its own", BOTH, lambda rig, patch: share(rig, "sampled")),
    Mutant("a slot's fetched tokens are its own", BOTH, lambda rig, patch: share(rig, "tokens", "token_array")),
    Mutant("an ended request's blocks outlive its last iteration", (CHECKER,), lambda rig, patch: blocks_at_once(rig)),
    Mutant(
        "a preempted request's blocks outlive its last iteration",
        (CHECKER,),
        lambda rig, patch: as_if_landed(rig, "preempt"),
    ),
    Mutant("blocks retire when their iteration has ended", (CHECKER,), lambda rig, patch: retire_early(rig)),
    Mutant("a row outlives its request's last iteration", BOTH, lambda rig, patch: as_if_landed(rig, "_end")),
    Mutant(
        "carry-over comes from the iteration before",
        (ADVERSARY,),
        lambda rig, patch: carry_from(rig, lambda slot, source: slot.sampled),
    ),
    Mutant(
        "only inputs that the host does not know are carried",
        (ADVERSARY,),
        lambda rig, patch: after_packing(patch, lambda step, packed: packed.carry.clip(0, out=packed.carry)),
    ),
    Mutant(
        "padding writes to the dummy block", (ADVERSARY,), lambda rig, patch: after_packing(patch, pad_into_live_block)
    ),
    Mutant(
        "a token is counted for the iteration that made it", (ADVERSARY,), lambda rig, patch: swap(rig, "token_array")
    ),
    Mutant("a token after the end of its request is dropped", (ADVERSARY,), lambda rig, patch: ends_forgotten(rig)),
    Mutant(
        "a graph holds the largest context that it may meet",
        (ADVERSARY,),
        lambda rig, patch: recaptured(rig, lambda shape: Work(shape, Bounds(1, 8, 1), sampling=False)),
        graphs=True,
    ),
    Mutant(
        "a graph is replayed on its own slot's buffers",
        (ADVERSARY,),
        lambda rig, patch: swapped_graphs(rig),
        graphs=True,
    ),
)


# -- who notices ------------------------------------------------------------------------------------------------------


def rigs(watcher: str, graphs: bool) -> Iterator[Rig]:
    for seed in range(NUM_GRAPH_RUNS if graphs else NUM_RUNS):
        yield stress(WATCHERS[watcher], seed, graphs=graphs, asynchronous=seed % 2 == 0)


def notices(watcher: str, mutant: Mutant, patch: pytest.MonkeyPatch) -> bool:
    """Whether a watcher notices something in one of the runs: the checker a race, the adversary anything else."""
    for rig in rigs(watcher, mutant.graphs):
        with patch.context() as here:
            mutant.broken(rig, here)
            try:
                rig.run()
            except RaceError:
                return True
            except Exception:
                if watcher == ADVERSARY:
                    return True
    return False


@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fact)
def test_a_broken_runtime_is_noticed(mutant: Mutant, watcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert notices(watcher, mutant, monkeypatch) == (watcher in mutant.by)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("watcher", WATCHERS)
def test_neither_notices_anything_in_the_unbroken_runtime(watcher: str, graphs: bool) -> None:
    for rig in rigs(watcher, graphs):
        rig.run()
