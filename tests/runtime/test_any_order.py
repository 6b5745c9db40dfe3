"""Streams in any order: all orders that the rules allow and no others; the same random numbers give the same order."""

import random
from itertools import permutations

from any_order import any_order
from hypothesis import given, settings
from hypothesis import strategies as st
from test_streams import calls, check_order


@settings(max_examples=100)
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
