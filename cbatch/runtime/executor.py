"""The executor that computes real tokens: streams, `num_stages + 1` slots used in turn, and one place where the host blocks.

    host      pack N | launch N+1 ...                            wait N: downloaded[N].synchronize()
    h2d         copy in N --uploaded-->
    compute                    carry-over, model, sampling N --computed-->
    d2h                                                                 copy out N --downloaded-->

In a pipeline each stage has its own h2d and compute streams. Stage s waits for stage s - 1 of the same iteration. Stage 0
waits for the last stage of iteration N - num_stages, whose tokens stage 0 carries over:

    compute 0   carry-over, layers N --computed-->             carry-over, layers N+2 ...
    compute 1                            layers, sampling N --computed-->

CPU and GPU differ in streams, pinned memory, and the `Iteration`s that compute. The executor knows nothing about policies.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import chain, islice
from math import inf
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np

from cbatch.drafts import Drafter
from cbatch.executor import CopyTimes, Step, StepResult
from cbatch.request import Ints
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.batch import Work
from cbatch.runtime.host_memory import StageCopies
from cbatch.runtime.iteration import Iteration
from cbatch.runtime.slots import Slot
from cbatch.runtime.streams import Event, StreamError, Streams

_PARTS = 4  # of an iteration without a graph, half a layer each, between two looks at an earlier step


class LaunchedStep(NamedTuple):
    """A launched step, its rows, its slot, and its number of tokens including padding."""

    step: Step
    num_rows: int
    slot: Slot
    num_tokens: int


class StreamExecutor:
    """Implements `cbatch.executor.Executor`.

    times_copies: whether results include copy times; costs two more events per iteration. Set it before a run.
    caches: the KV caches by stage and rank. host_copies: of each stage, between its cache and host memory; empty without the latter.
    """

    needs_tokens = True

    def __init__(
        self, streams: Streams, slots: Sequence[Slot], iterations: Sequence[Iteration], drafter: Drafter | None = None
    ) -> None:
        """slots: `num_stages + 1` slots of these streams. iterations: one per stage; the first iteration chooses the shapes. drafter: theirs."""
        self.drafter = drafter
        self.num_stages = len(iterations)
        self.times_copies = False
        self.caches: Sequence[Sequence[PagedCache]] = ()
        self.host_copies: Sequence[StageCopies] = ()
        self._computed_at = 0.0  # by the first stage, in the iteration that the host waited for last
        self._launching: Slot | None = None  # the slot of a step that is not enqueued whole
        self._left: Iterator[None] = iter(())  # enqueues the rest of it
        self._streams = streams
        self._slots = slots
        self._iterations = list(iterations)

    def send_to(self, receiver: "StreamExecutor") -> int:
        """Returns the place in `Step.sent` of index 0 in the caches of another executor, of equal stages and ranks, which stay referenced.

        Raises ConfigError if the models write to their own caches only.
        """
        (place,) = {
            cache.connect(other) for cache, other in zip(chain(*self.caches), chain(*receiver.caches), strict=True)
        }
        return place

    def follow(self, event: Event) -> None:
        """Lets the iterations that are launched from now on wait for an event, of these devices or others."""
        self.ready_at()
        for compute in self._streams.compute:
            compute.wait(event)

    def launch(self, step: Step) -> LaunchedStep:
        """Packs the step and enqueues its work without waiting: all of it, or the first operations of an iteration without a graph."""
        self.ready_at()
        slot = self._slots[step.index % len(self._slots)]
        assert not slot.in_use, "the host waits for iteration N before it launches N + num_stages + 1"
        slot.in_use, split = True, step.split()
        shape, num_rows = self._iterations[0].shape(split), len(split.rows)
        self._launching, self._left = slot, self._enqueue(step, slot, slot.pack(split, shape), num_rows)
        next(self._left, None)
        return LaunchedStep(step, num_rows, slot, shape.num_tokens)

    def _enqueue(self, step: Step, slot: Slot, work: Work, num_rows: int) -> Iterator[None]:
        """Enqueues a packed step. Yields, every few operations, where the host may do other work."""
        streams, d2h = self._streams, self._streams.d2h
        copied = [copies.launch(step, step.copies) for copies in self.host_copies] if step.copies is not None else []
        for number, (h2d, compute, stage, iteration) in enumerate(
            zip(streams.h2d, streams.compute, slot.stages, self._iterations, strict=True)
        ):
            if self.times_copies:
                h2d.record(stage.upload_started)
            h2d.run(partial(stage.upload, work))
            h2d.record(stage.uploaded)

            for event in (*stage.awaited, *copied[number : number + 1]):
                compute.wait(event)
            compute.record(stage.started)
            left = compute.run(partial(iteration, stage, work))
            while left is not None and len(compute.run(partial(_take, left))) == _PARTS:
                yield
            compute.record(stage.computed)

        d2h.wait(slot.stages[-1].computed)
        if self.times_copies:
            d2h.record(slot.download_started)
        d2h.run(partial(slot.download, num_rows))
        d2h.record(slot.downloaded)
        self._launching = None

    def wait(self, in_flight: LaunchedStep) -> StepResult:
        """Blocks until the step's tokens are on the host. No other call in the runtime blocks the host.

        Meanwhile it goes on with the launch of the next step. Raises StreamError if an operation of this step or of an earlier step failed.
        """
        (step, num_rows, slot, num_tokens), origin = in_flight, self._origin
        try:
            for _ in self._left:
                if slot is not self._launching and slot.downloaded.is_reached():
                    break
            if slot is self._launching:
                raise StreamError(f"iteration {step.index} was not launched whole: its launch has failed")
            slot.downloaded.synchronize()
        finally:
            slot.in_use = False
        tokens, guesses = slot.fetch(num_rows)
        accepted = None if step.drafts is None else _count_accepted(step.first_rows, step.drafts, tokens == guesses)
        spans = tuple((stage.started.time() - origin, stage.computed.time() - origin) for stage in slot.stages)
        copies = None
        if self.times_copies:
            first = slot.stages[0]
            events = first.upload_started, first.uploaded, slot.download_started, slot.downloaded
            copies = CopyTimes(*(event.time() - origin for event in events))
        stages, blocks = spans if len(spans) > 1 else None, None
        if step.copies is not None:
            could_begin = max(slot.stages[0].uploaded.time() - origin, self._computed_at)
            blocks = self.host_copies[0].result(step, step.copies, origin, could_begin)
        self._computed_at = spans[0][1]
        return StepResult(tokens, spans[0][0], spans[-1][1], copies, num_tokens, stages, blocks, accepted)

    def ready_at(self) -> float:
        for _ in self._left:
            pass
        return 0.0

    def ends_at(self, in_flight: LaunchedStep) -> float:
        self.ready_at()
        return self.now() if in_flight.slot.downloaded.is_reached() else inf

    def now(self) -> float:
        """Returns the seconds since the clock was first read, which the engine does at the start of its run."""
        origin = self._origin
        return perf_counter() - origin

    def sleep_until(self, time: float) -> None:
        if (seconds := time - self.now()) > 0:
            sleep(seconds)

    def restart(self) -> None:
        self.ready_at()
        vars(self).pop("_origin", None)
        self._computed_at = 0.0

    def close(self) -> None:
        self._streams.close()
        for copies in self.host_copies:
            copies.stream.close()

    @cached_property
    def _origin(self) -> float:
        return perf_counter()


def _take(left: Iterator[None]) -> list[None]:
    """Enqueues some of what is left, and returns an item for each part."""
    return list(islice(left, _PARTS))


def _count_accepted(first: Ints, drafts: Ints, equal: Any) -> Ints:
    """Returns the accepted drafts of each request, [requests]. first: their first rows. equal: bool [rows], see `carry.count_accepted`."""
    after = np.arange(drafts.max(initial=0))
    rows = np.minimum(first[:, None] + after, len(equal) - 1)
    accepted: Ints = np.logical_and.accumulate(equal[rows] & (after < drafts[:, None]), 1).sum(1)
    return accepted
