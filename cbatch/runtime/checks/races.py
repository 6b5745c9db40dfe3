"""Streams that check for races: any two accesses to the same memory, one of them a write, must be ordered.

    enqueued operation   comes after what the host did before, and after what its stream was made to wait for
    event                stands for what its stream had been given when it was recorded, and for what came before that
    synchronize          puts all that the event stands for before what the host does next

A race is found when it is enqueued, whether or not it would do harm this time, because only the host's calls are
checked. So the same check works for threads and for CUDA streams, and it cannot see undeclared accesses.
"""

import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from cbatch.errors import RaceError
from cbatch.request_table import Ints
from cbatch.runtime.checks.happens_before import HOST, WHOLE, Clock, History
from cbatch.runtime.streams import Event, Items, Memory, Operation, Result, Stream, Streams, stream_names


class CheckedEvent:
    """An event, and the accesses that it stands for. The clock is written at each record."""

    def __init__(self, inner: Event, checker: "Checker") -> None:
        self.inner = inner
        self.clock: Clock | None = None  # None: never recorded
        self._checker = checker

    def synchronize(self) -> None:
        self.inner.synchronize()
        if self.clock is not None:
            self._checker.history.clocks.learn(HOST, self.clock)

    def time(self) -> float:
        return self.inner.time()


class CheckedStream:
    """A stream that keeps track of what each of its operations comes after."""

    def __init__(self, inner: Stream, agent: int, checker: "Checker") -> None:
        """agent: its number in the checker's history."""
        self.inner = inner
        self._agent, self._checker, self._clocks = agent, checker, checker.history.clocks

    def event(self) -> CheckedEvent:
        return CheckedEvent(self.inner.event(), self._checker)

    def run(self, operation: Operation[Any]) -> None:
        """Enqueue an operation that accesses what it declares and nothing else.

        Raises:
            RaceError: one of its accesses races with an earlier one.
            StreamError: as the stream itself.
        """
        self._follow_host()
        self._checker.access(self._agent, operation)
        self.inner.run(operation)

    def record(self, event: CheckedEvent) -> None:
        self._follow_host()
        event.clock = self._clocks.of(self._agent)
        self.inner.record(event.inner)

    def wait(self, event: CheckedEvent) -> None:
        self._follow_host()
        if event.clock is not None:
            self._clocks.learn(self._agent, event.clock)
        self.inner.wait(event.inner)

    def close(self) -> None:
        self.inner.close()

    def _follow_host(self) -> None:
        """What is enqueued from here on comes after what the host has done so far."""
        self._clocks.learn(self._agent, self._clocks.known[HOST])


class CheckedStreams(Streams):
    """Checked streams, and a host whose accesses are checked too. Made by `checked`."""

    checker: "Checker"

    def name(self, tensor: torch.Tensor, name: str) -> None:
        self.checker.names[_memory(tensor)] = name

    def begin(self, iteration: int) -> None:
        self.checker.iteration = iteration

    def run_on_host(self, operation: Operation[Result]) -> Result:
        self.checker.access(HOST, operation)
        return operation.body()


def checked(streams: Streams) -> CheckedStreams:
    """Wrap streams so that every access is checked."""
    checker = Checker(["the host", *stream_names(len(streams.compute))])
    made = CheckedStreams.of([CheckedStream(each, agent, checker) for agent, each in enumerate(streams.all, HOST + 1)])
    made.checker = checker
    return made


class Checker:
    """What checked streams, events and the host share.

    iteration: the one that the host works on; None before the first.
    names: of tensors' memory, by address; for messages.
    """

    def __init__(self, agents: Sequence[str]) -> None:
        self.history = History(agents)
        self.iteration: int | None = None
        self.names: dict[Hashable, str] = {}

    def access(self, agent: int, operation: Operation[Any]) -> None:
        """Note the accesses of an operation.

        Raises:
            RaceError: names the memory, and both accesses with their iterations.
        """
        reads, writes = list(_parts(operation.reads)), list(_parts(operation.writes))
        race = self.history.access(agent, self.iteration, _site(), reads=reads, writes=writes)
        if race is None:
            return
        name = self.names.get(race.memory, str(race.memory))
        what = f"{name} {race.item}" if isinstance(race.memory, str) else name
        remedy = "make a stream wait for an event between them, or the host for the earlier one"
        raise RaceError(f"race on {what}: {race.later} is not ordered after {race.earlier}; {remedy}")


def _parts(accessed: Memory) -> Iterator[tuple[Hashable, Ints]]:
    for part in accessed:
        yield (part.kind, part.numbers()) if isinstance(part, Items) else (_memory(part), WHOLE)


def _memory(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage, which its views share."""
    return tensor.untyped_storage().data_ptr()


def _site() -> str:
    """The line of the host's program that made the call: the nearest frame outside this file."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    name = frame.f_code.co_filename.rpartition("/")[2]
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
