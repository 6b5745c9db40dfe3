"""Streams that check for races: any two accesses to the same memory, one of them a write, must be ordered.

    enqueued operation   comes after what the host did before, and after what its stream was made to wait for
    event                stands for what its stream had been given when it was recorded, and for what came before that
    synchronize          puts all that the event stands for before what the host does next

A race is found when it is enqueued, whether or not it would do harm this time, because only the host's calls are
checked. So the same check works for threads and for CUDA streams. `accesses` says what each operation accesses.
"""

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from accesses import Accesses, Declarations, Items
from happens_before import HOST, Clock, History, Place

from cbatch.executor import Step
from cbatch.runtime.batch import Shape, Work
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.slots import Slot
from cbatch.runtime.streams import Event, Stream, Streams, stream_names

E = TypeVar("E", bound=StreamExecutor)


class RaceError(Exception):
    """Two accesses to the same memory are unordered: the message names both, and the memory."""


class Checker:
    """What checked streams, events and the host share.

    iteration: the one that the host works on; None before the first.
    names: of tensors' memory, by address; for messages.
    """

    def __init__(self, agents: Sequence[str]) -> None:
        self.history = History(agents)
        self.iteration: int | None = None
        self.names: dict[Hashable, str] = {}
        self.declarations = Declarations()

    def access(self, agent: int, accesses: Accesses) -> None:
        """Note the accesses of an operation.

        Raises:
            RaceError: names the memory, and both accesses with their iterations.
        """
        race = self.history.access(agent, self.iteration, _site(), _places(accesses.reads), _places(accesses.writes))
        if race is None:
            return
        where, item = race.place
        name = self.names.get(where, str(where))
        what = f"{name} {item}" if isinstance(where, str) else name
        remedy = "make a stream wait for an event between them, or the host for the earlier one"
        raise RaceError(f"race on {what}: {race.later} is not ordered after {race.earlier}; {remedy}")

    def run_on_host(self, operation: Callable[[], object]) -> None:
        self.access(HOST, self.declarations.of(operation))
        operation()

    def watch(self, slots: Sequence[Slot]) -> None:
        """Check what the host does with slots, and name their buffers in messages."""
        for slot in slots:
            self._watch_slot(slot)
            for tensor, name in _buffers(slot):
                self.names[memory(tensor)] = f"slot {slot.index}'s buffer {name}"

    def _watch_slot(self, slot: Slot) -> None:
        pack, fetch, declarations = slot.pack, slot.fetch, self.declarations

        def checked_pack(step: Step, shape: Shape) -> Work:
            self.iteration = step.index
            self.access(HOST, declarations.of_packing(slot, step))
            return pack(step, shape)

        def checked_fetch(num_rows: int) -> Any:
            self.access(HOST, declarations.of_fetching(slot))
            return fetch(num_rows)

        slot.pack, slot.fetch = checked_pack, checked_fetch  # type: ignore[method-assign]


class CheckedEvent:
    """An event, and the accesses that it stands for. The clock is written at each record."""

    def __init__(self, inner: Event, history: History) -> None:
        self.inner, self._history = inner, history
        self.clock: Clock | None = None  # None: never recorded

    def synchronize(self) -> None:
        self.inner.synchronize()
        if self.clock is not None:
            self._history.learn(HOST, self.clock)

    def is_reached(self) -> bool:
        return self.inner.is_reached()

    def time(self) -> float:
        return self.inner.time()


class CheckedStream:
    """A stream that keeps track of what each of its operations comes after."""

    def __init__(self, inner: Stream, agent: int, checker: Checker) -> None:
        """agent: its number in the checker's history."""
        self.inner = inner
        self._agent, self._checker, self._history = agent, checker, checker.history

    def event(self) -> CheckedEvent:
        return CheckedEvent(self.inner.event(), self._history)

    def run(self, operation: Callable[[], object]) -> Any:
        """Enqueue an operation that accesses what is declared and nothing else.

        Raises:
            RaceError: one of its accesses races with an earlier one.
            StreamError: as the stream itself.
        """
        self._follow_host()
        self._checker.access(self._agent, self._checker.declarations.of(operation))
        return self.inner.run(operation)

    def record(self, event: CheckedEvent) -> None:
        self._follow_host()
        event.clock = self._history.known[self._agent].copy()
        self.inner.record(event.inner)

    def wait(self, event: CheckedEvent) -> None:
        self._follow_host()
        if event.clock is not None:
            self._history.learn(self._agent, event.clock)
        self.inner.wait(event.inner)

    def close(self) -> None:
        self.inner.close()

    def _follow_host(self) -> None:
        """What is enqueued from here on comes after what the host has done so far."""
        self._history.learn(self._agent, self._history.known[HOST])


def checked(streams: Streams, *more: str) -> tuple[Checker, Streams]:
    """Wrap streams so that every access is checked. more: names of further streams, which the caller wraps."""
    checker = Checker(["the host", *stream_names(len(streams.compute)), *more])
    return checker, Streams.of(
        [CheckedStream(each, agent, checker) for agent, each in enumerate(streams.all, HOST + 1)]
    )


def check_races(executor: E) -> E:
    """Check every access of an executor that has computed nothing yet; returns the executor."""
    names = [f"blocks {stage}" for stage in range(len(executor.host_copies))]
    checker, executor._streams = checked(executor._streams, *names)
    made: dict[Event, CheckedEvent] = {}

    def wrapped(event: Event) -> CheckedEvent:
        return made.setdefault(event, CheckedEvent(event, checker.history))

    for slot in executor._slots:
        for part, names in ((slot, ("downloaded", "download_started")), *((stage, _EVENTS) for stage in slot.stages)):
            for name in names:
                setattr(part, name, wrapped(getattr(part, name)))
        for stage in slot.stages:
            stage.awaited = tuple(map(wrapped, stage.awaited))
    for stage, copies in enumerate(executor.host_copies):
        copies.stream = CheckedStream(copies.stream, HOST + 1 + len(executor._streams.all) + stage, checker)
        copies._events = [(wrapped(started), wrapped(copied)) for started, copied in copies._events]
        checker.declarations.stages |= dict.fromkeys(copies._ranks, stage)
    checker.watch(executor._slots)
    return executor


_EVENTS = ("uploaded", "computed", "started", "upload_started")


def _buffers(slot: Slot) -> Iterator[tuple[torch.Tensor, str]]:
    yield from ((slot.host, "'host'"), (slot.tokens, "'tokens'"))
    for name in ("sampled", "guesses"):
        for number, buffer in enumerate(getattr(slot, name)):
            yield buffer, f"'{name}'{_of_rank(number)}"
    for stage in slot.stages:
        where = f" in stage {stage.stage}" if stage.stage else ""
        for number, rank in enumerate(stage.ranks):
            yield rank.device, f"'device'{where}{_of_rank(number)}"
            yield rank.rejected, f"'rejected'{where}{_of_rank(number)}"
            if stage.stage:
                yield rank.arriving, f"'arriving'{where}{_of_rank(number)}"


def _of_rank(rank: int) -> str:
    return f" of rank {rank}" if rank else ""


def _places(accessed: Sequence[Any]) -> Iterator[Place]:
    for part in accessed:
        if isinstance(part, Items):
            yield from ((part.kind, number) for number in part.numbers)
        else:
            yield memory(part), 0


def memory(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage, which its views share."""
    return tensor.untyped_storage().data_ptr()


def _site() -> str:
    """The line of the host's program that made the call: the nearest frame outside this file."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    name = frame.f_code.co_filename.rpartition("/")[2]
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
