"""Tests of the tests: rules of the runtime are broken in turn, and the watchers that can see the fault must notice.

checker     checked streams, all work done in order and at once: a race is reported, harmful or not
adversary   streams in any order: tokens come out wrong, or the accounts do not add up
"""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from any_order import any_order
from races import RaceError
from rig import Rig, stress

from cbatch.runtime import slots as slots_module
from cbatch.runtime.gpu.ranks import finish

NUM_RUNS = 8
"""Runs, every other one sync, in one of which each mutant must be noticed."""

CHECKER, ADVERSARY = "checker", "adversary"


def deaf(stream: str, rig: Rig) -> None:
    """The stream ignores waits."""
    [broken] = getattr(rig.executor._streams, stream) if stream != "d2h" else [rig.executor._streams.d2h]
    broken.wait = lambda event: None


def recorded_early(rig: Rig) -> None:
    """Events of h2d are recorded before the operation that they stand for."""
    [broken] = rig.executor._streams.h2d
    run, record, held = broken.run, broken.record, list[Any]()
    broken.run = lambda operation: held.append(partial(run, operation))
    broken.record = lambda event: (record(event), held and held.pop()())


def host_does_not_wait(rig: Rig) -> None:
    for slot in rig.slots:
        slot.downloaded.synchronize = lambda: None


def one_device_buffer(rig: Rig) -> None:
    first, second = (slot.stages[0].ranks[0] for slot in rig.slots)
    second.device = first.device


def preempted_early(rig: Rig) -> None:
    """While the state preempts, it believes that no iteration in flight uses the request."""
    state: Any = rig.engine.state
    until, inner = state.in_flight_until, state.preempt

    def broken(*args: Any) -> Any:
        state.in_flight_until = lambda request: None
        try:
            return inner(*args)
        finally:
            state.in_flight_until = until

    state.preempt = broken


def row_freed_early(rig: Rig) -> None:
    """Rows are freed as if no iteration were in flight."""
    state: Any = rig.engine.state
    free_row = state.free_row

    def broken(row: int) -> None:
        num_ended, state.num_ended = state.num_ended, inf
        free_row(row)
        state.num_ended = num_ended

    state.free_row = broken


def retire_early(rig: Rig) -> None:
    """With an iteration, the blocks of the one after it are free too."""
    pool: Any = rig.engine.state.pool
    retire = pool.retire
    pool.retire = lambda iteration: (retire(iteration), retire(iteration + 1))


def carried_from(distance: int, rig: Rig) -> None:
    """The first stage reads the tokens of `distance` iterations before; it waits as ever."""
    for slot in rig.slots:
        slot.stages[0].ranks[0].arriving = rig.slots[slot.index - distance].sampled[0]


def other_tokens(rig: Rig) -> None:
    first, second = rig.slots
    first.token_array, second.token_array = second.token_array, first.token_array


def ends_forgotten(rig: Rig) -> None:
    """A row does not remember that its request has ended."""
    table: Any = rig.engine.state.table
    close = table.close
    table.close = lambda request: (row := request._row, close(request), table.ended.__setitem__(row, False))


def unawaited(stage: int, rig: Rig) -> None:
    """The stage's compute does not wait for the stage before."""
    for slot in rig.slots:
        slot.stages[stage].awaited = slot.stages[stage].awaited[:1]


def fetched_after_first_stage(rig: Rig) -> None:
    """d2h waits for the first stage where it should wait for the last."""
    d2h = rig.executor._streams.d2h
    wait, other = d2h.wait, {slot.stages[-1].computed: slot.stages[0].computed for slot in rig.slots}
    d2h.wait = lambda event: wait(other[event])  # type: ignore[method-assign]


def does_not_wait(rig: Rig) -> None:
    """A rank reads the parts of the others at once."""
    meetings = rig.iterations[0].models[1]._meetings  # type: ignore[attr-defined]
    exchange = meetings.exchange

    def hurried(*args: Any) -> Any:
        yield from ()
        return finish(exchange(*args))

    meetings.exchange = hurried


def same_share(rig: Rig) -> None:
    """The second rank has the first one's part of a matrix of the first layer."""
    first, second = (model._body.layers[0].mlp for model in rig.iterations[0].models)  # type: ignore[attr-defined]
    second.up_proj.weight = first.up_proj.weight


def same_cache(rig: Rig) -> None:
    first, second = rig.iterations[0].models
    second.cache = first.cache  # type: ignore[attr-defined]


def other_guesses(rig: Rig) -> None:
    """Tokens are compared with the drafts of the iteration itself."""
    for slot in rig.slots:
        slot.stages[0].ranks[0].arriving_guesses = slot.guesses[0]


def nothing_is_told(rig: Rig) -> None:
    """A stage does not tell the next what was rejected."""
    for slot in rig.slots:
        for stage in slot.stages[1:]:
            stage.ranks[0].rejected = torch.zeros_like(stage.ranks[0].rejected)


STAGES, RANKS, DRAFTS = {"num_stages": 2}, {"num_ranks": 2}, {"max_drafts": 3}
MUTANTS: dict[str, tuple[str, Callable[[Rig], object], dict[str, int]]] = {
    "compute waits for uploaded": ("checker adversary", partial(deaf, "compute"), {}),
    "d2h waits for computed": ("checker adversary", partial(deaf, "d2h"), {}),
    "the host waits for downloaded": ("checker adversary", host_does_not_wait, {}),
    "uploaded is recorded after the copy": ("checker adversary", recorded_early, {}),
    "a slot has a device buffer of its own": ("checker adversary", one_device_buffer, {}),
    "a row outlives its request's last iteration": ("checker adversary", row_freed_early, {}),
    "blocks outlive a preempted request's last iteration": ("checker", preempted_early, {}),
    "blocks retire when their iteration has ended": ("checker", retire_early, {}),
    "carry-over comes from the iteration before": ("adversary", partial(carried_from, 0), {}),
    "a token is counted for the iteration that made it": ("adversary", other_tokens, {}),
    "a token after the end of its request is dropped": ("adversary", ends_forgotten, {}),
    "a stage waits for the stage before": ("checker adversary", partial(unawaited, 1), STAGES),
    "the first stage waits for the tokens that it carries": ("checker adversary", partial(unawaited, 0), STAGES),
    "tokens are fetched after the last stage": ("checker adversary", fetched_after_first_stage, STAGES),
    "carry-over comes from num_stages iterations before": ("checker adversary", partial(carried_from, 1), STAGES),
    "tokens are compared with their own iteration's drafts": ("adversary", other_guesses, DRAFTS),
    "each stage hears what was rejected": ("adversary", nothing_is_told, STAGES | DRAFTS),
    "a rank reads parts after all have stored theirs": ("adversary", does_not_wait, RANKS),
    "ranks have different columns": ("adversary", same_share, RANKS),
    "a rank has its own part of the KV cache": ("adversary", same_cache, RANKS),
}
"""By what no longer holds: the watchers that must notice, the fault, and the sizes of the rig."""


def noticed(watcher: str, rig: Rig) -> bool:
    """Whether the watcher notices something: the checker a race, the adversary anything."""
    try:
        rig.run()
    except RaceError:
        return True
    except Exception:
        return watcher == ADVERSARY
    return False


@pytest.mark.parametrize(("fact", "watcher"), [(fact, name) for fact in MUTANTS for name in MUTANTS[fact][0].split()])
def test_a_broken_runtime_is_noticed(fact: str, watcher: str) -> None:
    _, broken, sizes = MUTANTS[fact]
    every = 8 if watcher == ADVERSARY else 0
    for seed in range(NUM_RUNS):
        rig = stress(
            partial(any_order, every=every), seed, asynchronous=seed % 2 == 0, check=watcher == CHECKER, **sizes
        )
        broken(rig)
        if noticed(watcher, rig):
            return
    raise AssertionError(f"{watcher} does not notice that it is broken: {fact}")


def pad_into_live_block(step: Any, packed: Any) -> None:
    """Padding writes to the first block of the batch's first request."""
    block = int(step.pool.tables[step.rows[0], 0])
    packed.kv_indices[int(step.num_tokens.sum()) :] = block * step.pool.block_size


def carry_known(step: Any, packed: Any) -> None:
    """Inputs that the host knows are carried over too."""
    packed.carry.clip(1, out=packed.carry)


def all_accepted(step: Any, packed: Any) -> None:
    """Drafts in flight are not taken back."""
    packed.behind[:] = 0


@pytest.mark.parametrize("change", [pad_into_live_block, carry_known, all_accepted])
def test_wrong_inputs_are_noticed(change: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    pack = slots_module.pack
    monkeypatch.setattr(slots_module, "pack", lambda step, shape, out: (pack(step, shape, out), change(step, out)))
    assert any(
        noticed(ADVERSARY, stress(any_order, seed, max_drafts=3 * (change is all_accepted))) for seed in range(NUM_RUNS)
    )
