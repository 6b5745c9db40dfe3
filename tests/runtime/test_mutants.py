"""Tests of the tests: each rule of the runtime is broken in turn, and one of two watchers must notice.

    checker     checked streams, all work done in order and at once: a race is reported, harmful or not
    adversary   streams in any order: tokens come out wrong, or the accounts do not add up

Neither may notice anything in the unbroken runtime.
"""

import random
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from any_order import any_order
from races import RaceError, checked
from rig import Rig, stress

from cbatch.runtime import slots as slots_module
from cbatch.runtime.batch import Bounds, Work
from cbatch.runtime.gpu.ranks import finish
from cbatch.runtime.slots import Slot
from cbatch.runtime.streams import Streams, stream_names

NUM_RUNS = 8
NUM_GRAPH_RUNS = 1
NUM_GROUP_RUNS = 3
"""Runs, every other one sync, in one of which each mutant must be noticed; fewer with graphs or ranks, which take long."""

CHECKER, ADVERSARY = "checker", "adversary"


def in_order(_: random.Random, num_stages: int) -> Streams:
    """Checked streams that run every operation at once."""
    return checked(any_order(random.Random(0), every=0, num_stages=num_stages))


def in_any_order(numbers: random.Random, num_stages: int) -> Streams:
    return any_order(numbers, num_stages=num_stages)


WATCHERS: dict[str, Callable[[random.Random, int], Streams]] = {CHECKER: in_order, ADVERSARY: in_any_order}


# -- what is broken ---------------------------------------------------------------------------------------------------

Break = Callable[[Rig, pytest.MonkeyPatch], object]


def stream_of(rig: Rig, name: str) -> Any:
    return dict(zip(stream_names(len(rig.iterations)), rig.streams.all, strict=True))[name]


def deaf(rig: Rig, stream: str) -> None:
    """The stream ignores waits."""
    stream_of(rig, stream).wait = lambda event: None


def early_record(rig: Rig, stream: str) -> None:
    """The stream's events are recorded before the operation that they stand for."""
    broken = stream_of(rig, stream)
    run, record, held = broken.run, broken.record, []
    broken.run = lambda operation: held.append(partial(run, operation))
    broken.record = lambda event: (record(event), held and held.pop()())


def other_event(rig: Rig, stream: str, name: str) -> None:
    """The stream waits for the event of the other slot."""
    first, second = (getattr(slot.stages[0], name) for slot in rig.slots)
    broken = stream_of(rig, stream)
    wait, other = broken.wait, {first: second, second: first}
    broken.wait = lambda event: wait(other[event])


def share(rig: Rig, *names: str) -> None:
    """Both slots have the same buffer."""
    first, second = rig.slots
    for name in names:
        for mine, other in ((second, first), (second.stages[0].ranks[0], first.stages[0].ranks[0])):
            if hasattr(other, name):
                setattr(mine, name, getattr(other, name))
    first.carry_from(second)
    second.carry_from(first)


class NeverInUse(Slot):
    """A slot that lets itself be taken again at any time."""

    in_use = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]


def one_slot(rig: Rig) -> None:
    rig.executor._slots = [rig.slots[0]] * 2
    rig.slots[0].carry_from(rig.slots[0])


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


def carry_from(rig: Rig, distance: int) -> None:
    """The first stage reads the tokens of `distance` iterations before; it waits as ever."""
    for slot in rig.slots:
        slot.stages[0].ranks[0].arriving = rig.slots[slot.index - distance].sampled[0]


def unawaited(rig: Rig, stage: int, place: int) -> None:
    """The stage's compute does not wait for one of its events: 0 uploaded, 1 computed of the stage before."""
    for slot in rig.slots:
        awaited = slot.stages[stage].awaited
        slot.stages[stage].awaited = (*awaited[:place], *awaited[place + 1 :])


def fetched_after_first_stage(rig: Rig) -> None:
    """d2h waits for the first stage where it should wait for the last."""
    wait = rig.streams.d2h.wait
    other = {slot.stages[-1].computed: slot.stages[0].computed for slot in rig.slots}
    rig.streams.d2h.wait = lambda event: wait(other[event])  # type: ignore[method-assign]


def as_many_slots_as_stages(rig: Rig) -> None:
    """The last slot is missing: iteration N finds its own in use, and carries over from it."""
    rig.executor._slots = rig.slots[:-1]
    for slot in rig.slots[:-1]:
        slot.stages[0].ranks[0].arriving = slot.sampled[0]
        slot.stages[0].awaited = (slot.stages[0].uploaded, slot.stages[-1].computed)


def share_hidden_states(rig: Rig) -> None:
    """Two iterations in flight have the same buffer between the stages."""
    first, second, _ = rig.slots
    arriving = first.stages[1].ranks[0].arriving
    second.stages[1].ranks[0].arriving = second.stages[0].ranks[0].leaving = arriving


def skips(rig: Rig) -> None:
    """The second rank leaves out its first exchange."""
    meetings = rig.iterations[0].models[1]._meetings
    exchange, left = meetings.exchange, [1]

    def broken(rank: int, part: Any) -> Any:
        if rank == 1 and left and left.pop():
            yield
            return [part, part]
        return (yield from exchange(rank, part))

    meetings.exchange = broken


def does_not_wait(rig: Rig) -> None:
    """A rank reads the parts at once."""
    meetings = rig.iterations[0].models[1]._meetings
    exchange = meetings.exchange
    meetings.exchange = lambda rank, part: hurried(exchange(rank, part))


def hurried(steps: Any) -> Any:
    yield from ()
    return finish(steps)


def one_set_of_parts(rig: Rig) -> None:
    meetings = rig.iterations[0].models[1]._meetings
    meetings._parts[1] = meetings._parts[0]


def wrong_slice(rig: Rig, module: str) -> None:
    """The second rank has the first one's part of a matrix of the first layer."""
    first, second = (dict(model._body.layers[0].named_modules())[module] for model in rig.iterations[0].models)
    second.weight = first.weight


def shared_cache(rig: Rig) -> None:
    first, second = rig.iterations[0].models
    second.cache = first.cache


def uploaded_to_first_rank(rig: Rig) -> None:
    for slot in rig.slots:
        [stage] = slot.stages
        alone = copy(stage)
        alone.ranks = stage.ranks[:1]
        stage.upload = alone.upload  # type: ignore[method-assign]


def sampled_for_first_rank(rig: Rig) -> None:
    for slot in rig.slots:
        rank = slot.stages[0].ranks[1]
        rank.leaving = rank.leaving.clone()


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
    iteration: Any = rig.iterations[0]
    iteration.work = work
    iteration.capture()


def swapped_graphs(rig: Rig) -> None:
    iteration: Any = rig.iterations[0]
    iteration.graphs = {(shape, 1 - slot): graph for (shape, slot), graph in iteration.graphs.items()}


def ends_forgotten(rig: Rig) -> None:
    """A row does not remember that its request has ended."""
    table: Any = rig.engine.state.table
    close = table.close
    table.close = lambda request: (row := request.row, close(request), table.ended.__setitem__(row, False))


@dataclass(frozen=True)
class Mutant:
    """A broken runtime.

    fact: what no longer holds. by: who must notice. graphs: whether iterations are replayed. num_stages: of the pipeline.
    num_ranks: of each stage.
    """

    fact: str
    by: tuple[str, ...]
    broken: Break
    graphs: bool = False
    num_stages: int = 1
    num_ranks: int = 1


PIPELINE = 2  # stages
GROUP = 2  # ranks

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
    Mutant("carry-over comes from the iteration before", (ADVERSARY,), lambda rig, patch: carry_from(rig, 0)),
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
    *(
        Mutant(fact, by, broken, num_stages=PIPELINE)
        for fact, by, broken in (
            ("a stage waits for the stage before", BOTH, lambda rig, patch: unawaited(rig, 1, 1)),
            ("the first stage waits for the tokens that it carries", BOTH, lambda rig, patch: unawaited(rig, 0, 1)),
            ("every stage waits for its upload", BOTH, lambda rig, patch: unawaited(rig, 1, 0)),
            ("every stage's compute waits", BOTH, lambda rig, patch: deaf(rig, "compute 1")),
            (
                "a stage's computed is recorded after its layers",
                BOTH,
                lambda rig, patch: early_record(rig, "compute 0"),
            ),
            ("tokens are fetched after the last stage", BOTH, lambda rig, patch: fetched_after_first_stage(rig)),
            (
                "there is a slot more than stages",
                BOTH,
                lambda rig, patch: (unguarded(rig), as_many_slots_as_stages(rig)),
            ),
            ("carry-over comes from num_stages iterations before", BOTH, lambda rig, patch: carry_from(rig, 1)),
            ("a slot's hidden states are its own", BOTH, lambda rig, patch: share_hidden_states(rig)),
            ("blocks outlive their last iteration in all stages", (CHECKER,), lambda rig, patch: blocks_at_once(rig)),
        )
    ),
    *(
        Mutant(fact, (ADVERSARY,), broken, num_ranks=GROUP)
        for fact, broken in (
            ("every rank stores its part at every meeting", lambda rig, patch: skips(rig)),
            ("a rank reads parts after all have stored theirs", lambda rig, patch: does_not_wait(rig)),
            ("parts are stored in two sets in turn", lambda rig, patch: one_set_of_parts(rig)),
            ("ranks have different heads", lambda rig, patch: wrong_slice(rig, "self_attn.q_proj")),
            ("ranks have different key-value heads", lambda rig, patch: wrong_slice(rig, "self_attn.v_proj")),
            ("ranks have the inputs of their heads", lambda rig, patch: wrong_slice(rig, "self_attn.o_proj")),
            ("ranks have different columns", lambda rig, patch: wrong_slice(rig, "mlp.up_proj")),
            ("ranks have the inputs of their columns", lambda rig, patch: wrong_slice(rig, "mlp.down_proj")),
            ("a rank has its own part of the KV cache", lambda rig, patch: shared_cache(rig)),
            ("inputs are copied to every rank", lambda rig, patch: uploaded_to_first_rank(rig)),
            ("a group's compute waits for uploaded", lambda rig, patch: deaf(rig, "compute")),
            ("every rank has the sampled tokens", lambda rig, patch: sampled_for_first_rank(rig)),
        )
    ),
)


# -- who notices ------------------------------------------------------------------------------------------------------


def rigs(watcher: str, graphs: bool, num_stages: int, num_ranks: int) -> Iterator[Rig]:
    streams = partial(WATCHERS[watcher], num_stages=num_stages)
    for seed in range(NUM_GRAPH_RUNS if graphs else NUM_GROUP_RUNS if num_ranks > 1 else NUM_RUNS):
        yield stress(
            streams, seed, graphs=graphs, asynchronous=seed % 2 == 0, num_stages=num_stages, num_ranks=num_ranks
        )


def notices(watcher: str, mutant: Mutant, patch: pytest.MonkeyPatch) -> bool:
    """Whether a watcher notices something in one of the runs: the checker a race, the adversary anything else."""
    for rig in rigs(watcher, mutant.graphs, mutant.num_stages, mutant.num_ranks):
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


PAIRS = [(mutant, watcher) for mutant in MUTANTS for watcher in (mutant.by if mutant.num_ranks > 1 else WATCHERS)]
"""What ranks do is inside one operation, where the checker does not look."""


@pytest.mark.parametrize(("mutant", "watcher"), PAIRS, ids=lambda part: getattr(part, "fact", part))
def test_a_broken_runtime_is_noticed(mutant: Mutant, watcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert notices(watcher, mutant, monkeypatch) == (watcher in mutant.by)


@pytest.mark.parametrize(
    ("graphs", "num_stages", "num_ranks"),
    [(False, 1, 1), (True, 1, 1), (False, PIPELINE, 1), (False, 1, GROUP)],
    ids=["eager", "graphs", "pipeline", "ranks"],
)
@pytest.mark.parametrize("watcher", WATCHERS)
def test_neither_notices_anything_in_the_unbroken_runtime(
    watcher: str, graphs: bool, num_stages: int, num_ranks: int
) -> None:
    for rig in rigs(watcher, graphs, num_stages, num_ranks):
        rig.run()
