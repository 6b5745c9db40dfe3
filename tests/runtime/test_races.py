"""Checked streams report a race exactly where two conflicting accesses are not ordered, and name both."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from accesses import Items, Operation
from any_order import any_order
from hypothesis import given, settings
from hypothesis import strategies as st
from races import CheckedStreams, RaceError, check_races, checked, memory
from schedules import UnitCost
from test_runtime_executor import BLOCK_SIZE, LIMITS
from test_tokens import POLICIES
from tiny_models import CPU, LLAMA, LONGEST_OUTPUT, greedy_references, paged_weights

from cbatch import Engine
from cbatch.kv import KVSize
from cbatch.model.checkpoint import Vocabulary
from cbatch.runtime.attention import PagedCache, ReferenceAttention
from cbatch.runtime.cpu import assemble
from cbatch.runtime.model import PagedModel
from cbatch.runtime.streams import stream_names


@pytest.fixture
def streams() -> CheckedStreams:
    """Checked streams that run nothing before the host waits for them."""
    return checked(any_order(random.Random(0)))


def nothing() -> None:
    """An operation that declares accesses and makes none."""


def blocks(*numbers: int) -> Items:
    return Items("KV block", np.array(numbers, np.int64))


def test_without_it_the_message_names_both_accesses_iterations_and_the_buffer(streams: CheckedStreams) -> None:
    buffer = torch.zeros(3)
    streams.checker.names[memory(buffer)] = "slot 0's buffer 'device'"
    streams.checker.iteration = 4
    streams.h2d[0].run(Operation(nothing, writes=(buffer[1:],)))
    streams.checker.iteration = 5
    with pytest.raises(RaceError) as caught:
        streams.compute[0].run(Operation(nothing, reads=(buffer.view(1, 3),)))
    message = str(caught.value)
    assert message.startswith("race on slot 0's buffer 'device': compute's read of iteration 5 (test_races.py:")
    assert "in test_without_it_the_message" in message
    assert "is not ordered after h2d's write of iteration 4 (test_races.py:" in message
    assert "\n" not in message


def test_items_are_distinguished(streams: CheckedStreams) -> None:
    streams.compute[0].run(Operation(nothing, writes=(blocks(1, 2),)))
    streams.h2d[0].run(Operation(nothing, writes=(blocks(0, 3),)))
    with pytest.raises(RaceError, match="race on KV block 3: d2h's read"):
        streams.d2h.run(Operation(nothing, reads=(blocks(3, 4),)))


def test_a_stream_goes_on_after_it_was_checked(streams: CheckedStreams) -> None:
    done: list[str] = []
    event = streams.compute[0].event()
    streams.compute[0].run(Operation(lambda: done.append("computed")))
    streams.compute[0].record(event)
    event.synchronize()
    assert done == ["computed"]
    assert event.time() > 0
    streams.close()


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


@settings(max_examples=400)
@given(program=calls)
def test_the_first_race_of_any_program_is_found_and_nothing_else(program: list[tuple]) -> None:
    streams = checked(any_order(random.Random(1)))
    events = [streams.h2d[0].event() for _ in range(NUM_EVENTS)]
    buffers = [torch.zeros(1) for _ in range(NUM_BUFFERS)]
    for number, (kind, agent, index, *rest) in enumerate(program):
        stream = dict(zip(AGENTS, [None, *streams.all], strict=True))[agent]
        try:
            if kind == "access":
                run = streams.run_on_host if stream is None else stream.run
                run(Operation(nothing, **{"writes" if rest[0] else "reads": (buffers[index],)}))
            elif kind == "synchronize":
                events[index].synchronize()
            else:
                getattr(stream, kind)(events[index])
        except RaceError:
            assert number == first_race(program)
            return
    assert first_race(program) is None


def test_sites_of_accesses_that_can_no_longer_race_are_deleted(streams: CheckedStreams) -> None:
    buffer = torch.zeros(1)
    events = [stream.event() for stream in streams.all]
    for _ in range(5000):
        streams.run_on_host(Operation(nothing, writes=(buffer,)))
        for stream, event, following in zip(streams.all, events, [*streams.all[1:], None], strict=True):
            stream.run(Operation(nothing, writes=(buffer,)))
            stream.record(event)
            if following is not None:
                following.wait(event)
        events[-1].synchronize()
    assert sum(map(len, streams.checker.history._accesses)) < 5000  # of 20,000


@pytest.mark.parametrize(("policy", "asynchronous"), [("orca", False), *((policy, True) for policy in POLICIES)])
def test_a_run_on_threads_is_free_of_races_and_makes_the_same_tokens(policy: str, asynchronous: bool) -> None:
    """The KV cache holds little more than the longest request may take: policies preempt, or wait for blocks."""
    limits = replace(LIMITS, tile=1)
    num_blocks = limits.max_request_tokens // BLOCK_SIZE + 1
    cache = PagedCache(LLAMA, KVSize(num_blocks, BLOCK_SIZE), CPU)
    model = PagedModel(paged_weights(LLAMA), cache, ReferenceAttention())
    executor = check_races(assemble([[model]], Vocabulary(LLAMA), limits))
    engine = Engine(
        POLICIES[policy](4),
        executor,
        limits,
        UnitCost(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        asynchronous=asynchronous,
    )
    chosen = greedy_references(LLAMA)[:6]
    requests = [reference.request(id_, LONGEST_OUTPUT) for id_, reference in enumerate(chosen)]
    engine.submit(requests)
    engine.run()
    executor.close()
    assert [request.output for request in requests] == [reference.output for reference in chosen]
    assert all(earlier.ended <= later.started for earlier, later in pairwise(engine.record.steps))
