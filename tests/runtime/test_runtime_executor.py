"""The executor: each of its waits is necessary, failures reach the host, and its times are right."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from rig import LONGEST, Ask, build
from schedules import UnitCost
from tiny_models import CPU, LLAMA, LONGEST_OUTPUT, Reference, greedy_references, make_executor, stage_models

from cbatch import Engine, Limits, Request
from cbatch.kv import KVSize
from cbatch.model.checkpoint import Vocabulary
from cbatch.runtime.attention import ReferenceAttention
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.iteration import EagerIteration
from cbatch.runtime.slots import make_slots
from cbatch.runtime.streams import Operation, StreamError, Streams, ThreadEvent, ThreadStream, stream_names
from policies.orca import Orca

LIMITS = Limits(max_batch=4, max_tokens=200, max_request_tokens=64)
NUM_BLOCKS, BLOCK_SIZE = 32, 8
DELAY = 0.02  # seconds; several times what an iteration takes


def delay() -> None:
    time.sleep(DELAY)


class TimelessEvent(ThreadEvent):
    """Has a time even before it was reached, as happens where a wait is missing."""

    def time(self) -> float:
        return 0.0


class UnheededEvent(TimelessEvent):
    """An event that the host does not wait for."""

    def synchronize(self) -> None:
        pass


class OddStream(ThreadStream):
    """A thread stream with chosen defects."""

    def __init__(
        self,
        name: str,
        *,
        gate: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
        deaf: bool = False,
        events: Callable[[], ThreadEvent] = ThreadEvent,
    ) -> None:
        """Args:
        gate: called before each operation.
        after: called after each operation, even if it failed.
        deaf: waits for no other stream.
        events: what `event` makes.
        """
        super().__init__(name)
        self.gate, self.after, self.deaf, self.events = gate, after, deaf, events

    def event(self) -> ThreadEvent:
        return self.events()

    def run(self, operation: Operation) -> None:
        super().run(self.gate)
        super().run(operation)
        self._enqueue(self.after)  # type: ignore[arg-type]

    def wait(self, event: ThreadEvent) -> None:
        if not self.deaf:
            super().wait(event)


Defects = dict[str, dict[str, Any]]  # of h2d, compute and d2h


def executor_on(defects: Defects) -> StreamExecutor:
    """Not poisoned: errors must show in the tokens."""
    streams = Streams.of([OddStream(name, **defects.get(name, {})) for name in stream_names()])
    slots = make_slots(LIMITS, BLOCK_SIZE, [[CPU]], streams)
    stages = stage_models(LLAMA, KVSize(NUM_BLOCKS, BLOCK_SIZE), ReferenceAttention())
    return StreamExecutor(streams, slots, [EagerIteration(models) for models in stages], Vocabulary(LLAMA))


def outputs(executor: StreamExecutor, chosen: list[Reference]) -> list[list[int]]:
    requests = [reference.request(id_, LONGEST_OUTPUT) for id_, reference in enumerate(chosen)]
    try:
        engine = Engine(Orca(), executor, LIMITS, UnitCost(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        engine.submit(requests)
        engine.run()
    finally:
        executor.close()
    return [request.output for request in requests]


SLOW: dict[str, Defects] = {
    "slow copies in": {"h2d": {"gate": delay}},
    "slow computing": {"compute": {"gate": delay}},
    "slow copies out": {"d2h": {"gate": delay}},
}


def without_a_wait(name: str) -> StreamExecutor:
    """An executor that lacks one wait, and in which what should be waited for always comes too late."""
    overtaken = threading.Semaphore(0)
    late = {"gate": overtaken.acquire}
    if name == "compute does not wait for uploaded":
        return executor_on({"h2d": late, "compute": {"deaf": True, "after": overtaken.release}})
    if name == "d2h does not wait for computed":
        d2h = {"deaf": True, "after": overtaken.release}
        return executor_on({"compute": {**late, "events": TimelessEvent}, "d2h": d2h})
    assert name == "the host does not wait for downloaded"
    executor = executor_on({"compute": {"events": TimelessEvent}, "d2h": {**late, "events": UnheededEvent}})
    wait = executor.wait
    executor.wait = lambda in_flight: (wait(in_flight), overtaken.release())[0]  # type: ignore[method-assign]
    return executor


@pytest.mark.parametrize("name", SLOW)
def test_slowness_of_any_stream_changes_no_token(name: str) -> None:
    chosen = greedy_references(LLAMA)[4:8]
    assert outputs(executor_on(SLOW[name]), chosen) == [reference.output for reference in chosen]


@pytest.mark.parametrize(
    "name",
    ["compute does not wait for uploaded", "d2h does not wait for computed", "the host does not wait for downloaded"],
)
def test_a_missing_wait_shows(name: str) -> None:
    """As wrong tokens, or as an error where another iteration's input is out of range in this one."""
    chosen = greedy_references(LLAMA)[4:8]
    with suppress(StreamError):
        assert outputs(without_a_wait(name), chosen) != [reference.output for reference in chosen]


def test_poison_reports_what_was_read_before_it_was_written() -> None:
    """A block that a request never wrote is NaN, and so is every logit that depends on it."""
    executor = make_executor(LLAMA, LIMITS, NUM_BLOCKS, BLOCK_SIZE)
    engine = Engine(
        Orca(), executor, LIMITS, UnitCost(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, asynchronous=False
    )
    reference = greedy_references(LLAMA)[-1]
    engine.submit([reference.request(0, 4)])
    engine.step()
    held = engine.state.pool.tables[0, : engine.state.pool.held[0]]
    held[:] = [page for page in range(NUM_BLOCKS) if page not in held][: len(held)]
    with pytest.raises(
        RuntimeError, match=r"poison: the tokens of rows \[0\] were computed from memory that was never written"
    ):
        engine.run()
    executor.close()


def test_an_operation_that_fails_is_met_at_the_wait_and_ends_the_executor() -> None:
    executor = make_executor(LLAMA, LIMITS, NUM_BLOCKS, BLOCK_SIZE)
    engine = Engine(Orca(), executor, LIMITS, UnitCost(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    engine.submit([Request(0, 3, 20, prompt=[1, 2, LLAMA.vocab_size])])  # no such token
    with pytest.raises(StreamError, match="stream 'compute' failed: IndexError: index out of range") as caught:
        engine.run()
    assert isinstance(caught.value.__cause__, IndexError)
    with pytest.raises(StreamError):
        engine.step()
    executor.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stream ")]


def test_the_asynchronous_loop_launches_an_iteration_before_the_last_has_ended() -> None:
    """The device holds each iteration back until the host waits for it; by then the next one must have been launched."""
    waited_for = threading.Semaphore(0)
    executor = executor_on({"compute": {"gate": waited_for.acquire}})
    wait = executor.wait
    executor.wait = lambda in_flight: (waited_for.release(), wait(in_flight))[1]  # type: ignore[method-assign]
    engine = Engine(Orca(), executor, LIMITS, UnitCost(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    engine.submit(reference.request(id_, 10) for id_, reference in enumerate(greedy_references(LLAMA)[:4]))
    steps = engine.run().steps
    executor.close()
    assert len(steps) == 10
    for step, following in pairwise(steps):
        assert following.launched_at < step.waited_at <= step.ended <= following.started
    assert all(step.planned_at <= step.started <= step.ended <= step.received_at for step in steps)


def test_the_clock_starts_with_the_run() -> None:
    executor = make_executor(LLAMA, LIMITS, NUM_BLOCKS, BLOCK_SIZE)
    time.sleep(0.05)  # workloads are made meanwhile
    before = time.perf_counter()
    begun = executor.now()
    assert 0 <= begun <= time.perf_counter() - before
    executor.sleep_until(begun + 0.03)
    assert executor.now() >= begun + 0.03
    executor.sleep_until(begun)  # in the past
    executor.close()


@pytest.mark.parametrize("slow", ["h2d", "d2h"])
def test_copies_are_timed_if_asked(slow: str) -> None:
    """Each starts after what it waits for, and takes as long as its operation."""
    executor = executor_on({slow: {"gate": delay}})
    executor.times_copies = True
    engine = Engine(Orca(), executor, LIMITS, UnitCost(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    engine.submit(reference.request(id_, 6) for id_, reference in enumerate(greedy_references(LLAMA)[:4]))
    record = engine.run()
    executor.close()
    for step, copies in zip(record.steps, record.copies, strict=True):
        assert step.planned_at <= copies.upload_started <= copies.upload_ended <= step.started
        assert step.ended <= copies.download_started <= copies.download_ended <= step.received_at
        in_seconds, out_seconds = (
            copies.upload_ended - copies.upload_started,
            copies.download_ended - copies.download_started,
        )
        assert (in_seconds if slow == "h2d" else out_seconds) >= DELAY


def test_copies_are_not_timed_unasked() -> None:
    executor = make_executor(LLAMA, LIMITS, NUM_BLOCKS, BLOCK_SIZE)
    engine = Engine(Orca(), executor, LIMITS, UnitCost(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    engine.submit([greedy_references(LLAMA)[0].request(0, 4)])
    assert engine.run().copies == []
    executor.close()


def test_an_executor_serves_one_run_after_the_other() -> None:
    """A run leaves nothing in slots or blocks that changes a later one, whichever slot it ended on."""
    executor = make_executor(LLAMA, LIMITS, NUM_BLOCKS, BLOCK_SIZE)
    for length in (1, 2, 3, 6):
        requests = [reference.request(id_, length) for id_, reference in enumerate(greedy_references(LLAMA)[8:12])]
        engine = Engine(Orca(), executor, LIMITS, UnitCost(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        engine.submit(requests)
        engine.run()
        expected = [reference.output[:length] for reference in greedy_references(LLAMA)[8:12]]
        assert [request.output for request in requests] == expected
    executor.close()


@pytest.mark.parametrize("graphs", [True, False])
def test_what_a_graph_computes_beyond_the_step_is_padding(graphs: bool) -> None:
    """The only graph takes LONGEST tokens and four more; the request has 1 to 12 prompt tokens, then one per iteration."""
    reference = greedy_references(LLAMA)[0]
    rig = build(Streams.of([*map(ThreadStream, stream_names())]), Orca(), [Ask(reference, 3, None, 0)], graphs=graphs)
    rig.run()
    tokens = [len(reference.prompt), 1, 1]
    padding = [LONGEST + 4 - number for number in tokens] if graphs else [0, 0, 0]
    steps = rig.engine.record.steps
    assert [step.num_prefill_tokens + step.num_decode_tokens for step in steps] == tokens
    assert [step.num_padding_tokens for step in steps] == padding


def test_a_slot_is_not_used_again_before_its_tokens_were_fetched() -> None:
    executor: Any = make_executor(LLAMA, LIMITS, NUM_BLOCKS, BLOCK_SIZE)
    executor._slots[0].in_use = True
    engine = Engine(Orca(), executor, LIMITS, UnitCost(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    engine.submit([greedy_references(LLAMA)[0].request(0, 2)])
    with pytest.raises(AssertionError, match="the host waits for iteration N before it launches N"):
        engine.run()
    executor.close()


def test_tokens_are_copied_out_of_the_slot() -> None:
    executor: Any = make_executor(LLAMA, LIMITS, NUM_BLOCKS, BLOCK_SIZE)
    slot = executor._slots[0]
    result = slot.fetch(2)
    slot.token_array[:] = 7
    assert result.tolist() == np.full(2, -1).tolist()
    executor.close()
