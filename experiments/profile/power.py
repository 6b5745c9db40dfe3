"""Measures how the GPU's clock follows its power: the times of iterations after a rest and after sustained prompts.

The measured effect on an iteration is less than the clock's full effect, as the clock moves while it runs:
`GpuClock.run`.

gain          light decodes, long enough | prompts: what they save
reserve       light decodes, long enough | short prompts, one after the other: with which reserve they would save as they do
loss          large ones until nothing is saved | prompts, or decodes: what they take more
rise          large ones until nothing is saved | decodes, or a pause, of known length | a short one: what it saves again

While the clock falls, savings add up to reserve * (1 - level ** 2).
"""

from collections.abc import Sequence
from itertools import pairwise
from math import expm1, log1p, sqrt
from statistics import median
from typing import NamedTuple

from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.power import PowerLimit
from experiments.profile.batches import prompts, spread
from experiments.profile.laboratory import Batch, Laboratory

LIGHT = Batch((), (1,))
"""The iteration with which a GPU rests."""

RESTED_SECONDS = 0.15
"""Duration of light or large iterations after which the clock has nearly settled; up to a fifth remained."""

RISE_SECONDS, PAUSE_SECONDS = 0.03, 0.02
"""Durations of decodes, and of a pause, after which the clock has risen in part."""

LARGE_SECONDS, SHORT_SECONDS = 0.06, 0.015
"""Approximate durations of the large iteration, which lowers the clock, and of the short one, which shows where it is."""

LARGEST_SECONDS = 0.12
"""Longest iteration to look at: for longer ones the saving is lost in noise."""

FALLING_SECONDS = 0.13
"""Duration of the short iterations during which the clock falls after a rest."""

DECODE_CONTEXT = 1056
"""Context of each decode, if requests may be that long."""

STEP = 1.1
"""Ratio of two measured sizes' times between which iterations are padded to a larger graph, which draws less power than full."""

REPEATS = 3

LEAST, MOST = 0.05, 0.95
"""Measured fractions are clipped to this range: near 0 or 1 they do not determine a time constant."""

NEARLY_ALL = 0.75
"""An iteration that saves more than this share of the reserve measures the reserve, not the full clock's effect."""


def power_limit(laboratory: Laboratory, bases: PiecewiseLinear, decode_counts: Sequence[int]) -> PowerLimit:
    """Measures the limit with decodes in these numbers; `bases`: seconds of mixed iterations in the steady state."""
    sizes = _sizes(laboratory, bases)

    def nearest(seconds: float) -> Batch:
        return min((Batch(prompts(size)) for size in sizes), key=lambda batch: abs(laboratory.seconds(batch) - seconds))

    rest = [LIGHT] * _repeats(laboratory, LIGHT, RESTED_SECONDS)
    saved = {size: max(_saved(laboratory, [*rest, Batch(prompts(size))])[0], 0.0) for size in sizes}
    large, short = nearest(LARGE_SECONDS), nearest(SHORT_SECONDS)
    spent = [large] * _repeats(laboratory, large, RESTED_SECONDS)
    first = saved[short.shape().num_tokens]
    reserve = _reserve(first, _falling(laboratory, rest, short))
    probe = Probe(short, reserve, _fallen(first, reserve))
    gain, loss = _prompts(laboratory, saved, reserve, spent)
    decode_loss, rise_seconds = _decodes(laboratory, decode_counts, spent, probe)
    risen, pause = _saved(laboratory, [*spent, short], PAUSE_SECONDS)
    idle_rise_seconds = _rise(max(pause, PAUSE_SECONDS), probe.level(risen))
    return PowerLimit(gain, loss, reserve, decode_loss, rise_seconds, idle_rise_seconds)


class Probe(NamedTuple):
    """The short iteration, and by how much of its range the clock falls during it; see `PowerLimit.reserve_seconds`."""

    batch: Batch
    reserve: float
    fall: float

    def level(self, saved: float) -> float:
        """Returns the clock before the iteration, clipped, from the seconds that it saved."""
        if not self.fall:
            return MOST
        level = saved / self.reserve / (2 * self.fall) + self.fall / 2
        if level < self.fall:  # at its end the clock is at its lowest
            level = sqrt(max(saved, 0.0) / self.reserve)
        return min(max(level, LEAST), MOST)


def _falling(laboratory: Laboratory, rest: Sequence[Batch], batch: Batch) -> list[float]:
    """Returns the seconds that each of these iterations saves after a rest, until the clock has fallen."""
    number, steady = _repeats(laboratory, batch, FALLING_SECONDS), laboratory.seconds(batch)
    taken = [laboratory.in_turn([*rest, *[batch] * number])[0][-number:] for _ in range(REPEATS)]
    return [steady - median(values) for values in zip(*taken, strict=True)]


def _reserve(first: float, saved: Sequence[float]) -> float:
    """Returns the reserve with which iterations would save most nearly what they do. first: of the first one, measured more often."""

    def distance(reserve: float) -> float:
        fall = _fallen(first, reserve)
        in_all = [reserve * (1 - max(1 - number * fall, 0.0) ** 2) for number in range(len(saved) + 1)]
        return sum(
            (after - before - seconds) ** 2 for (before, after), seconds in zip(pairwise(in_all), saved, strict=True)
        )

    return min((first * (1 + step / 50) for step in range(50 * len(saved))), key=distance)


def _prompts(
    laboratory: Laboratory, saved: dict[int, float], reserve: float, spent: Sequence[Batch]
) -> tuple[PiecewiseLinear, PiecewiseLinear]:
    """Returns `gain` and `loss` of a `PowerLimit`.

    saved: seconds that prompts save after a rest, by their tokens. spent: prompts that leave the clock at its lowest.
    """
    usable = [size for size in saved if saved[size] <= NEARLY_ALL * reserve] or [min(saved)]
    gains, losses = [], []
    for size in usable:
        batch = Batch(prompts(size))
        steady = laboratory.seconds(batch)
        gain, loss = _at_full_and_lowest(saved[size], _lost(laboratory, [*spent, batch]), reserve)
        gains.append(gain / steady)
        losses.append(loss / steady)
    sizes = tuple(map(float, usable))
    return PiecewiseLinear(sizes, tuple(gains)), PiecewiseLinear(sizes, tuple(losses))


def _decodes(
    laboratory: Laboratory, decode_counts: Sequence[int], spent: Sequence[Batch], probe: Probe
) -> tuple[PiecewiseLinear, PiecewiseLinear]:
    """Returns `decode_loss` and `rise_seconds` of a `PowerLimit`. spent: large iterations that leave the clock at its lowest."""
    longest = laboratory.limits.max_request_tokens
    context = min(DECODE_CONTEXT, longest)
    batches = [Batch((), spread(number, context, longest)) for number in decode_counts]
    held = [batch for batch in batches if laboratory.holds(batch)] or [LIGHT]
    losses, rises = [], []
    for batch in held:
        steady, number = laboratory.seconds(batch), _repeats(laboratory, batch, RISE_SECONDS)
        risen, _ = _saved(laboratory, [*spent, *[batch] * number, probe.batch])
        rises.append(_rise(number * steady, probe.level(risen)))
        losses.append(_lost(laboratory, [*spent, batch]) / steady * _times_seen(steady / rises[-1]))
    numbers = tuple(float(len(batch.decodes)) for batch in held)
    return PiecewiseLinear(numbers, tuple(losses)), PiecewiseLinear(numbers, tuple(rises))


def _at_full_and_lowest(saved: float, lost: float, reserve: float) -> tuple[float, float]:
    """Returns `gain` and `loss` of an iteration from what it saves after a rest and loses at the lowest clock."""
    both = saved + lost
    if not both or not reserve:
        return 0.0, 0.0
    swing = 2 * reserve * _fallen(both, reserve)
    return swing * saved / both, swing * lost / both


def _fallen(saved: float, reserve: float) -> float:
    """Returns by how much of its range the clock falls from its full rate while an iteration saves so much; clipped."""
    return 1 - sqrt(1 - min(saved / reserve, MOST)) if reserve else 0.0


def _times_seen(settling: float) -> float:
    """Returns an iteration's loss at a constant clock over its loss while the clock rises."""
    return settling / -expm1(-settling)


def _rise(seconds: float, part: float) -> float:
    """Returns the time constant of a clock that covers this part of the distance in these seconds."""
    return -seconds / log1p(-part)


def _sizes(laboratory: Laboratory, bases: PiecewiseLinear) -> list[int]:
    """Returns the tokens of the iterations to look at: at least a fifth apart, or on both sides of a step in time; always the smallest."""
    sizes: list[int] = []
    before = 0.0
    for size, seconds in zip(map(int, bases.sizes), bases.seconds, strict=True):
        if not sizes or ((size >= 1.2 * sizes[-1] or seconds >= STEP * before) and seconds <= LARGEST_SECONDS):
            sizes.append(size)
        before = seconds
    return [size for size in sizes if laboratory.holds(Batch(prompts(size)))]


def _saved(laboratory: Laboratory, batches: Sequence[Batch], pause: float = 0.0) -> tuple[float, float]:
    """Returns the seconds that the last of these iterations saves over its steady state, and the pause before it."""
    taken = [laboratory.in_turn(batches, pause) for _ in range(REPEATS)]
    seconds, paused = median(seconds[-1] for seconds, _ in taken), median(paused for _, paused in taken)
    return laboratory.seconds(batches[-1]) - seconds, paused


def _lost(laboratory: Laboratory, batches: Sequence[Batch]) -> float:
    """Returns the seconds that the last of these iterations takes beyond its steady state."""
    return max(-_saved(laboratory, batches)[0], 0.0)


def _repeats(laboratory: Laboratory, batch: Batch, seconds: float) -> int:
    return max(round(seconds / laboratory.seconds(batch)), 1)
