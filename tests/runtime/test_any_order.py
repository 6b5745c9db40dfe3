"""Streams in any order: all orders that the rules allow and no others; the same random numbers give the same order."""

import random
from itertools import permutations

import pytest
from any_order import any_order
from hypothesis import given, settings
from hypothesis import strategies as st
from races import checked
from rig import stress
from test_streams import calls, check_order, fail
from tiny_models import DEEP

from cbatch.errors import DeviceError
from cbatch.runtime.streams import StreamError


@settings(max_examples=150)
@given(calls=calls, numbers=st.randoms(use_true_random=False))
def test_any_program_runs_in_an_order_that_the_rules_allow(
    calls: list[tuple[str, int, int]], numbers: random.Random
) -> None:
    check_order(calls, any_order(numbers).all)


def order_of(seed: int) -> str:
    """h2d does a, then b after which it records; compute does c, waits, does d; the host notes 'H' after all calls."""
    done: list[str] = []
    streams = any_order(random.Random(seed), every=3)
    event, last = streams.h2d[0].event(), streams.compute[0].event()
    streams.h2d[0].run(lambda: done.append("a"))
    streams.h2d[0].run(lambda: done.append("b"))
    streams.h2d[0].record(event)
    streams.compute[0].run(lambda: done.append("c"))
    streams.compute[0].wait(event)
    streams.compute[0].run(lambda: done.append("d"))
    streams.compute[0].record(last)
    done.append("H")
    last.synchronize()
    return "".join(done)


def test_every_order_that_the_rules_allow_comes_up_and_no_other() -> None:
    allowed = {
        "".join(order)
        for order in permutations("abcdH")
        if order.index("a") < order.index("b") < order.index("d") and order.index("c") < order.index("d")
    }
    assert {order_of(seed) for seed in range(2000)} == allowed


def test_an_exception_surfaces_at_the_next_synchronize_that_depends_on_it() -> None:
    streams = any_order(random.Random(0))
    done: list[int] = []
    computed, downloaded, other = streams.compute[0].event(), streams.d2h.event(), streams.h2d[0].event()
    streams.compute[0].run(fail)
    streams.compute[0].record(computed)
    streams.d2h.wait(computed)
    streams.d2h.run(lambda: done.append(1))
    streams.d2h.record(downloaded)
    streams.h2d[0].record(other)
    other.synchronize()
    with pytest.raises(StreamError, match="stream 'compute' failed: ZeroDivisionError") as caught:
        downloaded.synchronize()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert done == []
    with pytest.raises(StreamError):
        streams.compute[0].run(fail)


def test_waiting_for_closed_streams_does_not_hang() -> None:
    streams = any_order(random.Random(3), every=0)
    streams.h2d[0]._order._ranking.reverse()  # the host first: nothing is done before it waits
    event = streams.h2d[0].event()
    streams.h2d[0].record(event)
    streams.close()
    with pytest.raises(DeviceError, match="no stream will reach"):
        event.synchronize()
    with pytest.raises(StreamError, match="'h2d' is closed"):
        streams.h2d[0].record(event)


@pytest.mark.parametrize(("num_stages", "graphs"), [(2, False), (3, False), (2, True)])
def test_slots_in_turn_hold_any_number_of_stages(num_stages: int, graphs: bool) -> None:
    """Tokens are carried over from `num_stages` iterations before; every access is ordered, whatever overtakes what."""
    for seed in range(1 if graphs else 3):
        rig = stress(
            lambda numbers: checked(any_order(numbers, num_stages=num_stages)),
            seed,
            spec=DEEP,
            graphs=graphs,
            num_stages=num_stages,
        )
        assert len(rig.slots) == num_stages + 1
        rig.run()
