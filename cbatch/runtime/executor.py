"""The executor of real tokens: three streams, two slots in turn, and one place where the host blocks.

    host      pack N | launch N+1 ...                            wait N: downloaded[N].synchronize()
    h2d         copy in N --uploaded-->
    compute                    carry-over, model, sampling N --computed-->
    d2h                                                                 copy out N --downloaded-->

It is the same on a CPU and on a GPU; what differs is the kind of streams, pinned memory, and who computes an iteration.
Knows nothing of policies or requests beyond the step that it is handed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter, sleep
from typing import NamedTuple

import numpy as np

from cbatch.executor import CopyTimes, Step, StepResult
from cbatch.request_table import Ints
from cbatch.runtime.batch import host_views, pack
from cbatch.runtime.checks.ownership import PAGE, ROW, Tenancy, pages_read, pages_written
from cbatch.runtime.iteration import Iteration, Work
from cbatch.runtime.slots import Slot
from cbatch.runtime.streams import Items, Streams
from cbatch.vocabulary import Vocabulary


class InFlight(NamedTuple):
    """A launched step: where its tokens will be, how many there are, and the places that sample."""

    slot: Slot
    num_rows: int
    sampled: Ints


class StreamExecutor:
    """Implements `cbatch.executor.Executor`.

    vocabulary: token ids and tokenizer of the model, for workloads.
    times_copies: whether results tell when the copies ran, for timelines; two more events an iteration. Set before a run.
    """

    num_stages = 1
    needs_tokens = True

    def __init__(self, streams: Streams, slots: Sequence[Slot], iteration: Iteration, vocabulary: Vocabulary) -> None:
        """slots: two, of these streams."""
        assert len(slots) == 2, "with one stage, one iteration is computed while the next is packed"
        self.vocabulary = vocabulary
        self.times_copies = False
        self._streams = streams
        self._slots = slots
        self._iteration = iteration
        self._tenancy = Tenancy()
        self._origin: float | None = None  # of the clock, in seconds of time.perf_counter

    def launch(self, step: Step) -> InFlight:
        """Pack the step and enqueue its three parts; returns without waiting for any."""
        slot, previous = self._slots[step.index % 2], self._slots[step.index % 2 - 1]
        assert not slot.in_use, "the host waits for iteration N before it launches N + 2"
        slot.in_use = True
        shape = self._iteration.shape(step)
        packed = host_views(slot.host_array, shape)
        self._begin(step, slot)
        pack(step, shape, packed)
        work = Work.of(shape, packed)

        h2d, compute, d2h = self._streams
        if self.times_copies:
            h2d.record(slot.upload_started)
        h2d.run(partial(slot.upload, shape.size), reads=(slot.host,), writes=(slot.device,))
        h2d.record(slot.uploaded)

        old, new = (Items(PAGE, partial(pages, packed, step.pool.block_size)) for pages in (pages_read, pages_written))
        compute.wait(slot.uploaded)
        compute.record(slot.started)
        compute.run(
            partial(self._iteration, slot, previous.sampled, work),
            reads=(slot.device, previous.sampled, old),
            writes=(slot.sampled, new),
        )
        compute.record(slot.computed)

        tokens_of = Items(ROW, lambda: step.rows)
        d2h.wait(slot.computed)
        if self.times_copies:
            d2h.record(slot.download_started)
        d2h.run(partial(slot.download, len(step.rows)), reads=(slot.sampled,), writes=(slot.tokens, tokens_of))
        d2h.record(slot.downloaded)
        return InFlight(slot, len(step.rows), step.sampled)

    def wait(self, in_flight: InFlight) -> StepResult:
        """Block until the step's tokens are on the host; nothing else in the runtime does.

        Raises:
            StreamError: an operation of the step, or of one before it, failed.
        """
        slot, origin = in_flight.slot, self._start()
        try:
            slot.downloaded.synchronize()
        finally:
            slot.in_use = False
        self._streams.host_reads(slot.tokens)
        tokens = slot.result(in_flight.num_rows)
        started, ended = slot.started.time() - origin, slot.computed.time() - origin
        if (tokens[in_flight.sampled] < 0).any():
            raise RuntimeError(
                f"poison: rows {np.flatnonzero(tokens < 0).tolist()} sampled from what was never written"
            )
        return StepResult(tokens, started, ended, self._copy_times(slot, origin) if self.times_copies else None)

    def now(self) -> float:
        """Seconds since the clock was first read, by the engine at the start of its run."""
        origin = self._start()
        return perf_counter() - origin

    def sleep_until(self, time: float) -> None:
        if (seconds := time - self.now()) > 0:
            sleep(seconds)

    def close(self) -> None:
        self._streams.close()

    def _begin(self, step: Step, slot: Slot) -> None:
        """Declare what the host does for an iteration: it fills a slot, and gives pages and rows to new tenants."""
        self._streams.begin(step.index)
        self._streams.host_writes(
            slot.host,
            Items(PAGE, partial(self._tenancy.new_pages, step)),
            Items(ROW, partial(self._tenancy.new_rows, step)),
        )

    def _copy_times(self, slot: Slot, origin: float) -> CopyTimes:
        events = slot.upload_started, slot.uploaded, slot.download_started, slot.downloaded
        return CopyTimes(*(event.time() - origin for event in events))

    def _start(self) -> float:
        if self._origin is None:
            self._origin = perf_counter()
        return self._origin
