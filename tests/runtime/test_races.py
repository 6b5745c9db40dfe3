"""Checked streams report a race exactly where two conflicting accesses are not ordered, and name both."""

import random

import pytest
import torch
from accesses import Items, Operation
from any_order import any_order
from hypothesis import given, settings
from hypothesis import strategies as st
from races import RaceError, checked, memory

from cbatch.runtime.streams import stream_names


def nothing() -> None:
    """An operation that declares accesses and makes none."""


def test_a_race_names_both_accesses_iterations_and_the_buffer() -> None:
    checker, streams = checked(any_order(random.Random(0)))
    buffer = torch.zeros(3)
    checker.names[memory(buffer)] = "slot 0's buffer 'device'"
    checker.iteration = 4
    streams.h2d[0].run(Operation(nothing, writes=(buffer[1:],)))
    checker.iteration = 5
    with pytest.raises(RaceError) as caught:
        streams.compute[0].run(Operation(nothing, reads=(buffer.view(1, 3),)))
    message = str(caught.value)
    assert message.startswith("race on slot 0's buffer 'device': compute's read of iteration 5 (test_races.py:")
    assert "in test_a_race_names_both" in message
    assert "is not ordered after h2d's write of iteration 4 (test_races.py:" in message


def test_items_are_distinguished() -> None:
    _, streams = checked(any_order(random.Random(0)))
    streams.compute[0].run(Operation(nothing, writes=(Items("KV block", [1, 2]),)))
    streams.h2d[0].run(Operation(nothing, writes=(Items("KV block", [0, 3]),)))
    with pytest.raises(RaceError, match="race on KV block 3: d2h's read"):
        streams.d2h.run(Operation(nothing, reads=(Items("KV block", [3, 4]),)))


NUM_EVENTS, NUM_BUFFERS = 3, 3
AGENTS = ("host", *stream_names())
calls = st.lists(
    st.one_of(
        st.tuples(st.just("access"), st.sampled_from(AGENTS), st.integers(0, NUM_BUFFERS - 1), st.booleans()),
        st.tuples(st.sampled_from(("record", "wait")), st.sampled_from(stream_names()), st.integers(0, NUM_EVENTS - 1)),
        st.tuples(st.just("synchronize"), st.just("host"), st.integers(0, NUM_EVENTS - 1)),
    ),
    max_size=30,
)


def first_race(program: list[tuple]) -> int | None:
    """The first access that races with an earlier one, by sets of all that comes before each agent's next access."""
    before: dict[str, set[int]] = {agent: set() for agent in AGENTS}
    recorded: list[set[int]] = [set() for _ in range(NUM_EVENTS)]
    accesses: list[tuple[int, int, bool]] = []
    for number, (kind, agent, index, *rest) in enumerate(program):
        before[agent] |= before["host"]
        if kind == "access":
            if any(
                buffer == index and (wrote or rest[0]) and earlier not in before[agent]
                for earlier, buffer, wrote in accesses
            ):
                return number
            accesses.append((number, index, rest[0]))
            before[agent].add(number)
        elif kind == "record":
            recorded[index] = set(before[agent])
        else:
            before[agent] |= recorded[index]
    return None


@settings(max_examples=150)
@given(program=calls)
def test_the_first_race_of_any_program_is_found_and_nothing_else(program: list[tuple]) -> None:
    checker, streams = checked(any_order(random.Random(1)))
    events = [streams.h2d[0].event() for _ in range(NUM_EVENTS)]
    buffers = [torch.zeros(1) for _ in range(NUM_BUFFERS)]
    for number, (kind, agent, index, *rest) in enumerate(program):
        stream = dict(zip(AGENTS, [None, *streams.all], strict=True))[agent]
        try:
            if kind == "access":
                run = checker.run_on_host if stream is None else stream.run
                run(Operation(nothing, **{"writes" if rest[0] else "reads": (buffers[index],)}))
            elif kind == "synchronize":
                events[index].synchronize()
            else:
                getattr(stream, kind)(events[index])
        except RaceError:
            assert number == first_race(program)
            return
    assert first_race(program) is None
