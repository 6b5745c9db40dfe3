"""Streams and events, which order a device's work. The host waits only for events.

The rules are the same as in CUDA:

    stream.run(operation)      operations of one stream run one after the other; operations of two streams in any order
    stream.record(event)       the event covers all work enqueued in the stream so far
    stream.wait(event)         work enqueued in the stream after this call runs after the event's most recent record
    event.synchronize()        the host blocks until the most recent record is reached

"Most recent" is decided when the call is made: recording an event again does not affect waits already enqueued. Waiting for
an event that was never recorded returns at once. On a CPU a stream is a worker thread, so tests can expose a missing wait.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, Self

from cbatch.errors import CbatchError

Operation = Callable[[], object]  # work for a stream


class StreamError(CbatchError):
    """An operation of a stream failed. The message names the stream and the exception, which is chained as the cause."""


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Blocks the host until the most recent record is reached. Raises StreamError if work before the record failed."""

    def is_reached(self) -> bool:
        """Whether the most recent record is reached."""

    def time(self) -> float:
        """Returns when the most recent record was reached, in seconds of `time.perf_counter`. It must have been reached."""


class Stream(Protocol):
    """Runs work in the order in which it was enqueued. All calls come from the host's thread and return at once."""

    def event(self) -> Any:
        """Returns a new event that this stream can record."""

    def run(self, operation: Operation) -> Any:
        """Enqueues an operation, and may return its result if the host has enqueued it itself."""

    def record(self, event: Any) -> None: ...

    def wait(self, event: Any) -> None: ...

    def close(self) -> None:
        """Releases the stream. Pending work may be dropped; synchronize first to keep it."""


class Streams(NamedTuple):
    """The streams of an executor. h2d, compute: copies in and computes, one stream per pipeline stage. d2h: copies out."""

    h2d: Sequence[Stream]
    compute: Sequence[Stream]
    d2h: Stream

    @classmethod
    def of(cls, streams: Sequence[Stream]) -> Self:
        """Groups streams that are in the order of `stream_names`."""
        num_stages = len(streams) // 2
        return cls(streams[:num_stages], streams[num_stages:-1], streams[-1])

    @property
    def all(self) -> list[Stream]:
        return [*self.h2d, *self.compute, self.d2h]

    def close(self) -> None:
        for stream in self.all:
            stream.close()


def stream_names(num_stages: int = 1) -> list[str]:
    """Returns the names of an executor's streams; names carry the stage's number if there are several stages."""
    ends = [f" {stage}" for stage in range(num_stages)] if num_stages > 1 else [""]
    return [*(f"{kind}{end}" for kind in ("h2d", "compute") for end in ends), "d2h"]


class Reached(NamedTuple):
    """When a record was reached, and the failure before it: the first in a chain of dependent work, or None."""

    time: float
    failure: StreamError | None


class ThreadEvent:
    """An event of `ThreadStream`s. Owner and only writer: the host's thread, which records it.

    latest: the record, of an event that another thread reaches once.
    """

    def __init__(self, latest: "Future[Reached] | None" = None) -> None:
        self._latest = latest

    def synchronize(self) -> None:
        if self._latest is not None and (failure := self._latest.result().failure):
            raise failure

    def is_reached(self) -> bool:
        return self._latest is None or self._latest.done()

    def time(self) -> float:
        assert self._latest is not None and self._latest.done(), "only an event that was reached has a time"
        return self._latest.result().time


class ThreadStream:
    """A stream that runs its operations on a worker thread.

    After an operation raises, later operations are skipped, since their inputs were never written. Streams that wait for a later
    event of this stream skip theirs as well. Events are still reached, so that no wait hangs, and `synchronize` raises the error.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._failure: StreamError | None = None  # written by the worker
        self._closing: Future[None] = Future()
        self._worker = threading.Thread(target=self._work, name=f"stream {name}", daemon=True)
        self._worker.start()

    def event(self) -> ThreadEvent:
        return ThreadEvent()

    def run(self, operation: Operation) -> None:
        """Enqueues an operation. Raises StreamError if the stream is closed."""
        self._enqueue(partial(self._run, operation))

    def record(self, event: ThreadEvent) -> None:
        record: Future[Reached] = Future()
        self._enqueue(lambda: record.set_result(Reached(time.perf_counter(), self._failure)))
        event._latest = record

    def wait(self, event: ThreadEvent) -> None:
        if (record := event._latest) is not None:
            self._enqueue(lambda: self._await(record))

    def close(self, timeout: float = 10.0) -> None:
        """Drops pending work, waits for the current operation and ends the thread. May be called twice.

        timeout: seconds after which a busy thread is left running.
        """
        if not self._closing.done():
            self._closing.set_result(None)
            self._queue.put(None)
        self._worker.join(timeout)

    def _enqueue(self, work: Callable[[], object]) -> None:
        if self._closing.done():
            raise StreamError(f"stream {self.name!r} is closed")
        self._queue.put(work)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            if self._closing.done() and not self._failure:
                self._failure = StreamError(f"stream {self.name!r} was closed before its work was done")
            try:
                work()
            except BaseException as error:
                text = f"stream {self.name!r} failed: {type(error).__name__}: {error}"
                self._failure = StreamError(str(error) if isinstance(error, CbatchError) else text)
                self._failure.__cause__ = error

    def _run(self, operation: Operation) -> None:
        if not self._failure:
            operation()

    def _await(self, record: Future[Reached]) -> None:
        """Blocks the worker until the record is reached or the stream closes; adopts a failure that precedes the record."""
        if not record.done():
            either: tuple[Future[Any], ...] = (record, self._closing)
            wait_for(either, return_when=FIRST_COMPLETED)
        if record.done():
            self._failure = self._failure or record.result().failure
