"""Streams and events: in what order a device does its work, and the one way in which the host waits for it.

The rules are CUDA's, and they are all there is:

    stream.run(operation)      operations of one stream run one after the other; those of two streams in any order
    stream.record(event)       the event stands for everything enqueued in the stream so far
    stream.wait(event)         what is enqueued in the stream from here on runs after the event's most recent record
    event.synchronize()        the host blocks until the most recent record is reached

"Most recent" is decided when the call is made: recording an event again does not disturb waits already enqueued. An
event that was never recorded holds nobody up.

On a CPU a stream is a worker thread. That is not a simulation of order, it is concurrency: where a wait is missing, work
really overtakes other work. Knows nothing of what the operations do; what they read and write is declared where they are
enqueued, for those who check it (`races`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from cbatch.errors import DeviceError
from cbatch.request_table import Ints

Operation = Callable[[], None]


class Items(NamedTuple):
    """Some of many numbered things that operations touch: pages of the KV cache, rows of the request table.

    kind: what they are, for messages; things of one kind are told apart by number.
    numbers: gives int64 [items]; called where the operation is enqueued, and only if accesses are checked.
    """

    kind: str
    numbers: Callable[[], Ints]


Touched = Sequence[Any]
"""What an access touches: tensors, each standing for its whole memory, and `Items`."""


class StreamError(DeviceError):
    """An operation of a stream failed; its exception, with its traceback, is the cause."""


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the host until the most recent record is reached.

        Raises:
            StreamError: work that the record stands for failed.
        """
        ...

    def time(self) -> float:
        """When the most recent record, which must have been reached, was reached; seconds of `time.perf_counter`."""
        ...


class Stream(Protocol):
    """Work that is done in the order in which it was enqueued. Calls come from the host's thread and return at once."""

    def event(self) -> Any:
        """A new event of the kind that this stream can record."""
        ...

    def run(self, operation: Operation, reads: Touched = (), writes: Touched = ()) -> None:
        """Enqueue an operation. What it reads and writes is declared for `races`; a stream itself does not look at it."""
        ...

    def record(self, event: Any) -> None: ...

    def wait(self, event: Any) -> None: ...

    def close(self) -> None:
        """Give the stream back. Work that has not begun may be dropped; synchronize first if it matters."""
        ...


class Streams(NamedTuple):
    """The three streams of an executor, named for what each does: copy in, compute, copy out.

    The host's own accesses to memory that it shares with them are declared here too. Nobody looks at them, unless the
    streams are checked.
    """

    h2d: Stream
    compute: Stream
    d2h: Stream

    def name(self, tensor: Any, name: str) -> None:
        """What to call a tensor's memory in messages."""

    def begin(self, iteration: int) -> None:
        """What is enqueued and declared from here on belongs to this iteration."""

    def host_reads(self, *touched: Any) -> None:
        """The host reads these now."""

    def host_writes(self, *touched: Any) -> None:
        """The host writes these now."""

    def close(self) -> None:
        for stream in self:
            stream.close()


class Failure:
    """The first exception of a chain of dependent work, and whether the host has seen it."""

    def __init__(self, stream_name: str, error: BaseException) -> None:
        self.stream_name, self.error, self.surfaced = stream_name, error, False

    def surface(self) -> StreamError:
        self.surfaced = True
        return StreamError(f"stream {self.stream_name!r} failed: {type(self.error).__name__}: {self.error}")


class Reached(NamedTuple):
    """How a record was reached: when, and after which failure, if any."""

    time: float
    failure: Failure | None


_Record = Future[Reached]


class ThreadEvent:
    """An event of `ThreadStream`s. Written by the host's thread alone, which is the only one to record it anew."""

    def __init__(self) -> None:
        self._latest: _Record | None = None

    def synchronize(self) -> None:
        if self._latest is None:
            return
        if failure := self._latest.result().failure:
            raise failure.surface() from failure.error

    def time(self) -> float:
        assert self._latest is not None and self._latest.done(), "only an event that was reached has a time"
        return self._latest.result().time


class ThreadStream:
    """A stream whose work is done by a thread of its own.

    An operation that raises ends the stream's work: what was enqueued behind it, and what other streams do after an event
    that stands for it, is skipped, because it would read what was never written. Events are still reached, so nobody
    waits for ever; the host meets the exception at its next `synchronize`, and the stream takes no work from then on.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._failure: Failure | None = None  # written by the worker
        self._closing: Future[None] = Future()
        self._worker = threading.Thread(target=self._work, name=f"stream {name}", daemon=True)
        self._worker.start()

    def event(self) -> ThreadEvent:
        return ThreadEvent()

    def run(self, operation: Operation, reads: Touched = (), writes: Touched = ()) -> None:
        """Enqueue an operation.

        Raises:
            StreamError: the stream has failed, and the host knows; or it is closed.
        """
        self._enqueue(partial(self._run, operation))

    def record(self, event: ThreadEvent) -> None:
        record: _Record = Future()
        self._enqueue(lambda: record.set_result(Reached(time.perf_counter(), self._failure)))
        event._latest = record

    def wait(self, event: ThreadEvent) -> None:
        if (record := event._latest) is not None:
            self._enqueue(lambda: self._await(record))

    def close(self, patience: float = 10.0) -> None:
        """Drop the work that has not begun, wait for the operation that has, end the thread. May be called twice.

        patience: seconds to wait; a thread that is still busy then is left to end by itself.
        """
        if not self._closing.done():
            self._closing.set_result(None)
            self._queue.put(None)
        self._worker.join(patience)

    def _enqueue(self, operation: Operation) -> None:
        if self._closing.done():
            raise StreamError(f"stream {self.name!r} is closed")
        if (failure := self._failure) and failure.surfaced:
            raise failure.surface() from failure.error
        self._queue.put(operation)

    def _work(self) -> None:
        while (operation := self._queue.get()) is not None:
            if self._closing.done() and not self._failure:
                self._failure = Failure(self.name, StreamError("closed before its work was done"))
            try:
                operation()
            except BaseException as error:
                self._failure = Failure(self.name, error)

    def _run(self, operation: Operation) -> None:
        if not self._failure:
            operation()

    def _await(self, record: _Record) -> None:
        """Hold the worker until the record is reached or the stream closes; take over the failure behind the record."""
        if not record.done():
            either: tuple[Future[Any], ...] = (record, self._closing)
            wait_for(either, return_when=FIRST_COMPLETED)
        if record.done():
            self._failure = self._failure or record.result().failure
