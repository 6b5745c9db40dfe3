"""The clock under a power limit: what iterations take depends on those before them."""

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
from cbatch.sim.executor import SimExecutor
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.measured import Measured
from cbatch.sim.power import STEADY, GpuClock, Pace, PowerLimit
from cbatch.sim.roofline import Ceilings
from policies.orca import Orca

LIMIT = PowerLimit(
    gain=PiecewiseLinear((10, 20), (0.0, 0.1)),
    loss=PiecewiseLinear((10, 20), (0.04, 0.0)),
    reserve_seconds=1.0,
    decode_loss=PiecewiseLinear((1, 4), (0.0, 0.1)),
    rise_seconds=PiecewiseLinear((1, 4), (1.0, 2.0)),
    idle_rise_seconds=0.5,
)


def test_prompts_save_the_reserve_and_no_more() -> None:
    clock = GpuClock(LIMIT)
    saved = [clock.run(Pace(gain=0.4, loss=0.0, settling=0.4)) for _ in range(50)]
    assert saved[:3] == pytest.approx([1 - exp(-0.4), exp(-0.4) - exp(-0.8), exp(-0.8) - exp(-1.2)])
    assert sum(saved) == pytest.approx(LIMIT.reserve_seconds)
    clock.rest(100.0)
    assert clock.run(Pace(0.001, 0.0, 0.001)) == pytest.approx(0.001, rel=0.001)
    assert clock.run(STEADY) == 0.0
    assert replace(LIMIT, reserve_seconds=0.0).of_prompts(20, 1.0) == STEADY  # there is nothing to save


def test_the_clock_rises_with_decodes_and_pauses() -> None:
    heavy, all_of_it = Pace(0.01, 0.0, 0.01), Pace(100.0, 0.0, 100.0)
    for rise in (
        lambda clock: clock.run(LIMIT.of_decodes(4)(2.0)),
        lambda clock: clock.run(LIMIT.of_decodes(1)(1.0)),  # which takes its time at any clock
        lambda clock: clock.rest(0.5),
    ):
        clock = GpuClock(LIMIT)
        clock.run(all_of_it)
        rise(clock)
        assert clock.run(heavy) == pytest.approx((1 - exp(-1)) * 0.01, rel=0.01)


def test_decodes_take_longer_while_the_clock_rises() -> None:
    clock = GpuClock(LIMIT)
    assert clock.run(LIMIT.of_decodes(4)(0.001)) == 0.0  # rested
    clock.run(Pace(100.0, 0.0, 100.0))
    lost = [-clock.run(LIMIT.of_decodes(4)(0.02)) for _ in range(100)]
    assert lost[0] == pytest.approx(0.1 * 0.02, rel=0.01)
    assert lost[50] == pytest.approx(lost[0] * exp(-0.5))
    assert sum(lost) == pytest.approx(0.1 * (1 - exp(-1)) * 2.0)


def test_an_iteration_takes_its_steady_time_at_its_own_clock() -> None:
    """Neither full nor the lowest: after a rest it saves, after heavier ones it loses, and after its like neither."""
    pace = Pace(gain=0.3, loss=0.1, settling=0.4)
    for heavy in (False, True):
        clock = GpuClock(LIMIT)
        if heavy:
            clock.run(Pace(100.0, 0.0, 100.0))
        changes = [clock.run(pace) for _ in range(60)]
        assert (changes[0] < 0) == heavy
        assert abs(changes[0]) < (0.1 if heavy else 0.3)
        assert changes[-1] == pytest.approx(0.0, abs=1e-9)


def test_many_decodes_leave_the_clock_where_they_settle() -> None:
    """At a quarter of the way: a prompt then saves a quarter of what it does after a rest, and decodes after a rest save three times what they lose after prompts."""
    limit = replace(LIMIT, decode_level=PiecewiseLinear((1, 4), (1.0, 0.25)))
    for number, level in ((1, 1.0), (4, 0.25)):
        clock = GpuClock(limit)
        first = clock.run(limit.of_decodes(number)(0.001))
        assert first == pytest.approx(0.3 * 0.001 if number == 4 else 0.0, rel=0.001)
        clock.run(limit.of_decodes(number)(100.0))
        assert clock.run(limit.of_decodes(number)(0.001)) == pytest.approx(0.0, abs=1e-9)
        assert clock.run(Pace(0.001, 0.0, 0.001)) == pytest.approx(level * 0.001, rel=0.001)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2), st.floats(0, 2), st.floats(0, 5)), max_size=30))
def test_no_more_is_saved_or_lost_than_the_clock_makes(steps: list[tuple[float, float, float, float]]) -> None:
    clock = GpuClock(LIMIT)
    for pause, gain, loss, settling in steps:
        clock.rest(pause)
        assert -loss - 1e-9 <= clock.run(Pace(gain, loss, settling)) <= gain + 1e-9


def test_shares_hold_beyond_the_sizes_that_were_measured() -> None:
    gains = [LIMIT.of_prompts(tokens, 1.0).gain for tokens in (1, 10, 15, 20, 1000)]
    assert gains == pytest.approx([0.0, 0.0, 0.05, 0.1, 0.1])
    assert [LIMIT.of_decodes(number)(1.0).loss for number in (1, 4, 100)] == pytest.approx([0.0, 0.1, 0.1])
    assert LIMIT.of_decodes(100)(1.0).settling == pytest.approx(0.5)


def cost(power: PowerLimit | None) -> ProfileCost:
    """Products of 1 ms a token and a layer, without attention to speak of."""
    linear = PiecewiseLinear((1, 1000), (1e-3, 1.0))
    zero = PiecewiseLinear((1,), (0.0,))
    head = PiecewiseLinear((1, 1000), (0.0, 0.0))  # beyond what is measured, reading its weights takes time
    measured = Measured(linear=linear, other=zero, head=head, embedding=zero, power=power)
    made = profile(measured={1: measured}, rates=AttentionRates(1e15, 1e18, 1e15))
    return ProfileCost(replace(made, ceilings=Ceilings(1e8, 1e10, 4)), SPEC)


def test_predictions_are_of_the_steady_state_and_executions_begin_rested() -> None:
    with_power, without = cost(LIMIT), cost(None)
    heavy, light = BatchShape(((20, 0),)), BatchShape((), 4, 4)
    for shape in (heavy, light):
        assert with_power.predict(shape) == pytest.approx(without.predict(shape))
        assert with_power.parts(shape).total == pytest.approx(with_power.predict(shape))
    times = with_power.execute(heavy)
    assert times.pace.gain == pytest.approx(0.1 * times.compute)
    assert with_power.execute(light).pace.gain == 0.0
    assert with_power.execute(light).pace.loss == pytest.approx(0.1 * without.predict(light))
    assert without.execute(heavy).pace == STEADY


def test_the_clock_rises_while_nothing_arrives() -> None:
    """The second burst of prompts finds the clock where the first one left it."""
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
    left = exp(-0.1 * spans[5.0][1] / 0.02)  # of the clock; nearly all is spent
    assert spans[0.0][1] - spans[0.0][0] == pytest.approx(0.02 * (1 - left), rel=0.05)
    assert spans[5.0][1] == pytest.approx(spans[5.0][0], abs=1e-5)
