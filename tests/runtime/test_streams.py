"""Thread streams follow CUDA's ordering rules and add none."""

import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn

import pytest
from commands import PATIENCE
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import in_time

from cbatch.runtime.streams import Stream, StreamError, ThreadEvent, ThreadStream


@pytest.fixture
def streams() -> Iterator[list[ThreadStream]]:
    streams = [ThreadStream(name) for name in ("first", "second")]
    yield streams
    for stream in streams:
        stream.close()


def finish(stream: Stream) -> None:
    """Block until everything enqueued so far has run."""
    event = stream.event()
    stream.record(event)
    event.synchronize()


def fail() -> NoReturn:
    raise ZeroDivisionError("the device divides by zero")


def test_two_streams_run_beside_the_host_and_each_other(streams: list[ThreadStream]) -> None:
    """Each waits for the other and for the host; a single thread for two of them would deadlock."""
    meeting, done = threading.Barrier(3, timeout=PATIENCE), list[int]()
    for stream in streams:
        stream.run(meeting.wait)
        stream.run(lambda: done.append(1))
    assert not done
    meeting.wait()
    for stream in streams:
        finish(stream)
    assert done == [1, 1]


def test_an_event_tells_when_it_was_reached(streams: list[ThreadStream]) -> None:
    stream = streams[0]
    begun, ended = stream.event(), stream.event()
    before = time.perf_counter()
    stream.record(begun)
    stream.run(lambda: time.sleep(0.02))
    stream.record(ended)
    ended.synchronize()
    assert before <= begun.time() <= ended.time() - 0.02 <= time.perf_counter() - 0.02


def test_a_failure_surfaces_at_each_synchronize_that_depends_on_it(streams: list[ThreadStream]) -> None:
    """With its traceback, on the streams that wait for it too; not in work that was recorded before or that is independent."""
    first, second = streams
    done: list[int] = []
    earlier, failed, independent, dependent = (stream.event() for stream in (first, first, second, second))
    first.record(earlier)
    first.run(fail)
    first.run(lambda: done.append(1))
    first.record(failed)
    second.record(independent)
    second.wait(failed)
    second.run(lambda: done.append(2))
    second.record(dependent)
    earlier.synchronize()
    independent.synchronize()
    for event in (failed, dependent):
        with pytest.raises(StreamError, match="stream 'first' failed: ZeroDivisionError: the device divides") as caught:
            event.synchronize()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert "in fail" in "".join(traceback.format_exception(caught.value))
    first.run(lambda: done.append(3))
    first.record(failed)
    with pytest.raises(StreamError, match="stream 'first' failed"):
        failed.synchronize()
    assert done == []  # what came behind the failure was skipped


def test_close_drops_work_that_has_not_begun_and_leaves_no_waiter() -> None:
    first, second = ThreadStream("first"), ThreadStream("second")
    begun, gate, done, event = threading.Event(), threading.Event(), [], ThreadEvent()
    first.run(begun.set)
    first.run(gate.wait)
    first.run(lambda: done.append(1))
    first.record(event)
    second.wait(event)
    assert begun.wait(PATIENCE)
    second.close()  # in the middle of its wait for the first
    first.close(timeout=0)  # its operation is not to end yet
    gate.set()
    first.close()
    assert done == []
    with pytest.raises(StreamError, match="closed before its work was done"):
        event.synchronize()
    with pytest.raises(StreamError, match="stream 'first' is closed"):
        first.run(lambda: None)


def test_close_does_not_hang_on_an_operation_that_does() -> None:
    stream, gate = ThreadStream("stuck"), threading.Event()
    stream.run(gate.wait)
    with in_time():
        stream.close(timeout=0.05)
    gate.set()


NUM_STREAMS, NUM_EVENTS = 3, 4
calls = st.lists(
    st.tuples(
        st.sampled_from(("run", "record", "wait")), st.integers(0, NUM_STREAMS - 1), st.integers(0, NUM_EVENTS - 1)
    ),
    max_size=40,
)


def check_order(calls: list[tuple[str, int, int]], streams: Sequence[Stream]) -> None:
    """Each operation records what had run before it, which must include all that the rules put before it."""
    events = [streams[0].event() for _ in range(NUM_EVENTS)]
    behind: list[set[int]] = [set() for _ in streams]  # operations that must come before the stream's next one
    recorded: list[set[int]] = [set() for _ in events]
    required: dict[int, set[int]] = {}
    seen: dict[int, set[int]] = {}
    for number, (kind, stream, event) in enumerate(calls):
        if kind == "run":
            required[number] = set(behind[stream])
            behind[stream].add(number)
            streams[stream].run(lambda number=number: seen.__setitem__(number, set(seen)))
        elif kind == "record":
            streams[stream].record(events[event])
            recorded[event] = set(behind[stream])
        else:
            streams[stream].wait(events[event])
            behind[stream] |= recorded[event]
    for stream in streams:
        finish(stream)
    assert required.keys() == seen.keys()
    assert all(required[number] <= seen[number] for number in required)


@settings(max_examples=40)
@given(calls=calls)
def test_any_program_runs_in_an_order_that_the_rules_allow(calls: list[tuple[str, int, int]]) -> None:
    streams = [ThreadStream(str(index)) for index in range(NUM_STREAMS)]
    check_order(calls, streams)
    for stream in streams:
        stream.close()
