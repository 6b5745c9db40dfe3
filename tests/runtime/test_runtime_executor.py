"""The executor: failures reach the host, its times are right, and one run leaves nothing for the next."""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import Any

import pytest
from any_order import AnyOrderStream
from fuzz_policy import FuzzPolicy
from rig import LONGEST, Ask, Rig, build, threads
from schedules import UnitCost
from tiny_models import LLAMA, greedy_references, make_executor, sampled_references

from cbatch import Engine, Limits, Request, Step
from cbatch.kv import KVSize
from cbatch.runtime.batch import Shape, Work
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.gpu.ranks import finish
from cbatch.runtime.iteration import EagerIteration
from cbatch.runtime.slots import StageSlot
from cbatch.runtime.streams import Operation, StreamError, Streams, stream_names
from policies.orca import Orca

LIMITS = Limits(max_batch=4, max_tokens=200, max_request_tokens=64)
KV = KVSize(32, 8)
DELAY = 0.02  # seconds; several times what an iteration takes
ASKS = [Ask(place, max_new_tokens=8) for place in range(4)]


def gated(stream: str, gate: Callable[[], object]) -> Rig:
    """gate: called on the stream before each of its operations."""
    rig = build(threads(), Orca(), ASKS, greedy_references(LLAMA))
    slowed = getattr(rig.executor._streams, stream)
    slowed = slowed[0] if isinstance(slowed, list | tuple) else slowed
    run = slowed.run

    def delayed(operation: Operation) -> None:
        run(gate)
        run(operation)

    slowed.run = delayed
    return rig


def engine_of(executor: StreamExecutor, requests: list[Request], *, asynchronous: bool = True) -> Engine:
    engine = Engine(Orca(), executor, LIMITS, UnitCost(), **KV._asdict(), asynchronous=asynchronous)
    engine.submit(requests)
    return engine


def test_poison_reports_what_was_read_before_it_was_written() -> None:
    """A block that a request never wrote is NaN, and so is every logit that depends on it."""
    executor = make_executor(LLAMA, LIMITS, *KV)
    engine = engine_of(executor, [greedy_references(LLAMA)[-1].request(0, 4)], asynchronous=False)
    engine.step()
    held = engine.state.pool.tables[0, : engine.state.pool.held[0]]
    held[:] = [page for page in range(KV.num_blocks) if page not in held][: len(held)]
    with pytest.raises(
        RuntimeError, match=r"poison: the tokens of rows \[0\] were computed from memory that was never"
    ):
        engine.run()
    executor.close()


def test_an_operation_that_fails_is_met_at_the_wait_and_ends_the_executor() -> None:
    of_others = {*threading.enumerate()}
    executor = make_executor(LLAMA, LIMITS, *KV)
    engine = engine_of(executor, [Request(0, 3, 20, prompt=[1, 2, LLAMA.vocab_size])])  # no such token
    with pytest.raises(StreamError, match="stream 'compute' failed: IndexError: index out of range") as caught:
        engine.run()
    assert isinstance(caught.value.__cause__, IndexError)
    with pytest.raises(StreamError):
        engine.step()
    executor.close()
    assert not [thread for thread in {*threading.enumerate()} - of_others if thread.name.startswith("stream ")]


def test_the_asynchronous_loop_launches_an_iteration_before_the_last_has_ended() -> None:
    """The device holds each iteration back until the host waits for it; by then the next one must have been launched."""
    waited_for = threading.Semaphore(0)
    rig = gated("compute", waited_for.acquire)
    wait = rig.executor.wait
    rig.executor.wait = lambda in_flight: (waited_for.release(), wait(in_flight))[1]  # type: ignore[method-assign]
    rig.run()
    steps = rig.engine.record.steps
    assert len(steps) == 8
    for step, following in pairwise(steps):
        assert following.launched_at < step.waited_at <= step.ended <= following.started
    assert all(step.planned_at <= step.started <= step.ended <= step.received_at for step in steps)


def test_the_clock_starts_with_the_run() -> None:
    executor = make_executor(LLAMA, LIMITS, *KV)
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
    rig = gated(slow, lambda: time.sleep(DELAY))
    rig.executor.times_copies = True
    rig.run()
    for step, copies in zip(rig.engine.record.steps, rig.engine.record.copies, strict=True):
        assert step.planned_at <= copies.upload_started <= copies.upload_ended <= step.started
        assert step.ended <= copies.download_started <= copies.download_ended <= step.received_at
        upload, download = (
            copies.upload_ended - copies.upload_started,
            copies.download_ended - copies.download_started,
        )
        assert (upload if slow == "h2d" else download) >= DELAY


def test_an_executor_serves_one_run_after_the_other() -> None:
    """A run leaves nothing in slots or blocks that changes a later one, whichever slot it ended on."""
    executor, references = make_executor(LLAMA, LIMITS, *KV), greedy_references(LLAMA)[8:12]
    for length in (1, 2, 3, 6):
        requests = [reference.request(id_, length) for id_, reference in enumerate(references)]
        assert engine_of(executor, requests).run().copies == []
        assert [request.output for request in requests] == [reference.output[:length] for reference in references]
    executor.close()


class Reached:
    """An event on a device that has done its work once `done` has so many entries, which takes time."""

    def __init__(self, done: list[str]) -> None:
        self.done, self.at = done, 0

    def is_reached(self) -> bool:
        return len(self.done) >= self.at

    def synchronize(self) -> None:
        self.done += ["wait"] * (self.at - len(self.done))

    def time(self) -> float:
        return 0.0


class Here(AnyOrderStream):
    """A stream as on a GPU, where the host enqueues each operation itself; its events are reached ten entries later."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def event(self) -> Any:
        return Reached(self.done)

    def run(self, operation: Operation) -> Any:
        return operation()

    def record(self, event: Any) -> None:
        event.at = len(self.done) + 10

    def wait(self, event: Any) -> None: ...

    def close(self) -> None: ...


class InParts(EagerIteration):
    """Computes prompts in parts, as iterations without a graph, and decodes at once. `more` yields parts of its own before them."""

    more: Callable[[], Iterator[None]]

    def __call__(self, stage: StageSlot, work: Work) -> Any:
        if work.shape.num_tokens > work.shape.num_rows:
            return chain(self.more(), self.parts(stage, work))
        return finish(self.parts(stage, work))


def joined(more: Callable[[], Iterator[None]], done: list[str]) -> Rig:
    """A prompt of several tokens joins decodes. done: see `Reached`."""
    asks = [Ask(0, max_new_tokens=8), Ask(1, max_new_tokens=4, arrival_iteration=3)]
    streams = Streams.of([Here(done) for _ in stream_names()])
    kind = type("InParts", (InParts,), {"more": staticmethod(more)})
    return build(streams, Orca(), asks, greedy_references(LLAMA), kind=kind, check=True)


def test_a_wait_goes_on_with_the_launch_of_the_next_iteration_and_the_next_plan_comes_after_it() -> None:
    """The first 4 of 30 parts are launched before the wait, which looks after every 4 more whether the decode, 10 parts long, has ended."""
    done: list[str] = []

    def parts() -> Iterator[None]:
        for _ in range(30):
            done.append("part")
            yield

    rig = joined(parts, done)
    plan, absorb = rig.engine.policy.plan, rig.engine.state.absorb
    events: list[tuple[str, int]] = []

    def noted(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (events.append((what, done.count("part"))), call(*given))[1]

    vars(rig.engine.policy)["plan"], vars(rig.engine.state)["absorb"] = noted("plan", plan), noted("absorb", absorb)
    rig.run()
    joins = events.index(("plan", 30)) - 2
    assert events[joins : joins + 3] == [("plan", 0), ("absorb", 12), ("plan", 30)]


def test_a_launch_that_fails_during_a_wait_keeps_its_own_slot_alone_and_has_no_tokens() -> None:
    def failing() -> Iterator[None]:
        yield from [None] * 30
        raise RuntimeError("no memory is left")

    rig = joined(failing, [])
    with pytest.raises(RuntimeError, match="no memory is left"):
        rig.run()
    assert [slot.in_use for slot in rig.slots].count(True) == 1
    [launched] = rig.engine._in_flight
    with pytest.raises(StreamError, match="was not launched whole"):
        rig.executor.wait(launched.handle)


class Largest(EagerIteration):
    """Computes all iterations in one shape, as a captured graph does."""

    def shape(self, step: Step) -> Shape:
        return Shape(LONGEST + 4, 4, LONGEST // 4)


@pytest.mark.long
@pytest.mark.parametrize("kind", [Largest, EagerIteration])
def test_what_an_iteration_computes_beyond_the_step_is_padding(kind: type[EagerIteration]) -> None:
    """And changes no token, though rows, blocks and tokens are padded."""
    rig = build(threads(), FuzzPolicy(1), ASKS, sampled_references(LLAMA), kind=kind)
    rig.run()
    for step in rig.engine.record.steps:
        tokens = step.num_prefill_tokens + step.num_decode_tokens
        assert 0 <= step.num_padding_tokens <= LONGEST + 4 - tokens
        assert kind is EagerIteration or step.num_padding_tokens == LONGEST + 4 - tokens
