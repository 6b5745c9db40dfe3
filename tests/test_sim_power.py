"""The power reserve: what iterations take depends on those before them, and what is saved is what was saved up."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_cluster import SPEC, profile

from cbatch import Engine, Limits, Request
from cbatch.cost import BatchShape
from cbatch.sim.attention import AttentionRates
from cbatch.sim.cost import ProfileCost
from cbatch.sim.curve import Curve
from cbatch.sim.executor import SimExecutor
from cbatch.sim.power import PowerLimit, PowerReserve
from cbatch.sim.profile import Measured
from policies.orca import Orca
from policies.prefill_first import PrefillFirst

LIMIT = PowerLimit(Curve((10, 20), (0.0, 0.1)), reserve_seconds=1.0, recovery=0.2, idle_recovery=0.5)


def test_full_clock_lasts_as_long_as_the_reserve() -> None:
    reserve = PowerReserve(LIMIT)

    def spend(gain: float, relief: float = 0.0) -> float:
        return reserve.spend(4.0, gain=gain, relief=relief, lag=0.0)

    assert [spend(0.4) for _ in range(4)] == pytest.approx([0.4, 0.4, 0.2, 0.0])
    reserve.rest(1.0)
    assert [spend(0.4, 0.1) for _ in range(4)] == pytest.approx([0.4, 0.3, 0.1, 0.1])
    reserve.rest(100.0)
    assert spend(2.0) == 1.0


def test_decodes_take_longer_while_the_clock_rises_after_prompts() -> None:
    limit = replace(LIMIT, lag=Curve((1, 4), (0.0, 0.1)), lag_seconds=2.0)
    assert [limit.lag_of(number) for number in (1, 4, 100)] == pytest.approx([0.0, 0.1, 0.1])
    reserve = PowerReserve(limit)

    def decodes(seconds: float = 1.0) -> float:
        return -reserve.spend(seconds, gain=0.0, relief=0.0, lag=0.1 * seconds)

    assert decodes() == 0.0  # rested
    reserve.spend(10.0, gain=1.0, relief=0.0, lag=0.0)
    assert decodes() == pytest.approx(0.1)
    assert decodes() == pytest.approx(0.1 * exp(-1.1 / 2))
    reserve.rest(100.0)
    assert decodes() == pytest.approx(0.0)
    reserve.spend(10.0, gain=0.5, relief=0.0, lag=0.0)  # of 1.0 that came back with the rest
    assert decodes() == pytest.approx(0.1 * 0.5)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2), st.floats(0, 2)), max_size=30))
def test_no_more_is_saved_than_was_saved_up(steps: list[tuple[float, float, float]]) -> None:
    reserve = PowerReserve(LIMIT)
    saved, given_back = 0.0, LIMIT.reserve_seconds
    for pause, wanted, returned in steps:
        reserve.rest(pause)
        taken = reserve.spend(1.0, gain=wanted, relief=returned, lag=0.0)
        assert 0 <= taken <= wanted
        saved, given_back = saved + taken, given_back + LIMIT.idle_recovery * pause + returned
        assert saved <= given_back + 1e-9


def test_shares_hold_beyond_the_sizes_that_were_measured() -> None:
    assert [LIMIT.share_of(tokens) for tokens in (1, 10, 15, 20, 1000)] == pytest.approx([0.0, 0.0, 0.05, 0.1, 0.1])


def cost(power: PowerLimit | None) -> ProfileCost:
    """Products of 1 ms a token and a layer, without attention to speak of."""
    linear = Curve((1, 1000), (1e-3, 1.0))
    rates = AttentionRates(1e15, 1e18, 1e15)
    zero = Curve((1,), (0.0,))
    measured = Measured(linear, rates.of(SPEC), zero, zero, zero, power=power)
    return ProfileCost(profile(measured={("small", 1): measured}), SPEC)


def test_predictions_are_of_the_lasting_state_and_executions_begin_rested() -> None:
    with_power, without = cost(LIMIT), cost(None)
    heavy, light = BatchShape(((20, 0),)), BatchShape((), 4, 4)
    for shape in (heavy, light):
        assert with_power.predict(shape) == pytest.approx(without.predict(shape))
        assert with_power.parts(shape).total == pytest.approx(with_power.predict(shape))
    times = with_power.execute(heavy)
    assert times.gain == pytest.approx(0.1 * times.compute)
    assert with_power.execute(light).gain == 0.0
    assert with_power.execute(light).relief == pytest.approx(0.2 * without.predict(light))
    assert without.execute(heavy).gain == 0.0


def test_a_run_is_faster_while_there_is_a_reserve_and_its_accounts_add_up() -> None:
    ended = {}
    for name, power in (("none", None), ("small", LIMIT), ("endless", replace(LIMIT, reserve_seconds=1e9))):
        executor = SimExecutor(cost(power))
        engine = Engine(PrefillFirst(), executor, Limits(4, 100, 200), executor.cost, num_blocks=100, block_size=16)
        engine.submit(Request(index, 20, 2) for index in range(4))
        ended[name] = engine.run().steps[-1].ended
        [account] = executor.accounts()
        assert account.span == pytest.approx(ended[name], abs=1e-9)
    assert ended["endless"] < ended["none"]
    assert ended["none"] - ended["small"] == pytest.approx(min(0.1 * 8 * 0.08, 1.0), rel=0.2)


def test_waiting_for_arrivals_saves_up() -> None:
    """The second burst of prompts finds the reserve that the first one spent."""
    power = replace(LIMIT, reserve_seconds=0.02)
    spans = {}
    for gap in (0.0, 5.0):
        executor = SimExecutor(cost(power))
        engine = Engine(Orca(), executor, Limits(1, 100, 200), executor.cost, num_blocks=100, block_size=16)
        engine.submit([Request(0, 80, 1), Request(1, 80, 1, arrival_time=gap)])
        steps = engine.run().steps
        spans[gap] = [
            step.ended - max(step.started, before) for step, before in zip(steps, [0.0, steps[0].ended], strict=True)
        ]
    assert spans[0.0][1] == pytest.approx(spans[0.0][0] + 0.02)
    assert spans[5.0][1] == pytest.approx(spans[5.0][0])
