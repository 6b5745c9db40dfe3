"""Measures how the GPU's clock follows its power, from iterations after a rest and after sustained prompts.

The measured effect on an iteration is less than the clock's full effect, since the clock moves during the iteration: see
`GpuClock.run`.

gain          light decodes, long enough | prompts: their saving
reserve       light decodes, long enough | large iterations until nothing is saved: their total saving
loss          large iterations until nothing is saved | prompts, or decodes: their extra time
rise          large iterations until nothing is saved | decodes, or a pause, of known length | a large iteration: its saving
level         large iterations until nothing is saved | decodes, long enough | a large iteration: its saving beside that after light decodes
"""

from collections.abc import Sequence
from math import expm1, log1p
from statistics import median

from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.power import PowerLimit
from experiments.profile.batches import prompts, spread
from experiments.profile.laboratory import Batch, Laboratory

LIGHT = Batch((), (1,))  # the iteration during which a GPU rests

RESTED_SECONDS = 0.15
"""Duration of light or large iterations after which the clock has nearly settled; up to a fifth of the distance remained."""

RISE_SECONDS, PAUSE_SECONDS, LEVEL_SECONDS = 0.03, 0.02, 0.3
"""Durations of decodes, and of a pause, after which the clock has partly risen, and of decodes after which it has settled."""

LARGE_SECONDS = 0.06
"""Approximate duration of the large iteration: long enough to lower the clock, short enough to measure its saving. If the largest
iteration is much shorter, it hardly lowers the clock, and the reserve is measured poorly."""

LARGEST_SECONDS = 0.12  # longest iteration to measure: in longer iterations the saving is lost in noise

FALLING, FALLEN = 4, 3
"""Number of large iterations during which the clock falls after a rest, and of later iterations for comparison. On an H100 five
iterations of 14 ms save time, the first two nearly all they can, so the difference of these two does not determine the sum."""

DECODE_CONTEXT = 1056  # context of each decode, unless requests must be shorter

REPEATS = 3

LEAST, MOST = 0.05, 0.95
"""Measured fractions are clipped to this range: near 0 or 1 they do not determine a time constant."""

NEARLY_ALL = 0.75
"""An iteration that saves more than this share of the reserve measures the reserve instead of the full clock's effect."""


def power_limit(
    laboratory: Laboratory, bases: PiecewiseLinear, decode_counts: Sequence[int], captured: int
) -> PowerLimit:
    """Measures the power limit.

    bases: seconds of mixed iterations in the steady state. decode_counts: numbers of decodes to measure.
    captured: most tokens of an iteration with a graph. After light decodes or a pause, the device waits for the launches of larger ones.
    """
    sizes = [size for size in _sizes(laboratory, bases) if size <= captured]
    rest = [LIGHT] * _repeats(laboratory, LIGHT, RESTED_SECONDS)
    saved = {size: max(_saved(laboratory, [*rest, Batch(prompts(size))])[0], 0.0) for size in sizes}
    large = min(sizes, key=lambda size: abs(laboratory.seconds(Batch(prompts(size))) - LARGE_SECONDS))
    batch, first = Batch(prompts(large)), saved[large]
    spent = [batch] * _repeats(laboratory, batch, RESTED_SECONDS)
    reserve = max(_reserve(laboratory, [*rest, *[batch] * FALLING, *[batch] * FALLEN]), *saved.values())
    gain, loss = _prompts(laboratory, saved, reserve, spent)
    decode_loss, rise_seconds, decode_level = _decodes(laboratory, decode_counts, spent, first)
    risen, pause = _saved(laboratory, [*spent, batch], PAUSE_SECONDS)
    idle_rise_seconds = _time_constant(max(pause, PAUSE_SECONDS), risen, first)
    return PowerLimit(gain, loss, reserve, decode_loss, rise_seconds, idle_rise_seconds, decode_level)


def _prompts(
    laboratory: Laboratory, saved: dict[int, float], reserve: float, spent: Sequence[Batch]
) -> tuple[PiecewiseLinear, PiecewiseLinear]:
    """Returns `gain` and `loss` of a `PowerLimit`.

    saved: seconds that prompts save after a rest, by tokens. spent: prompts that leave the clock at its lowest.
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
    laboratory: Laboratory, decode_counts: Sequence[int], spent: Sequence[Batch], first: float
) -> tuple[PiecewiseLinear, PiecewiseLinear, PiecewiseLinear]:
    """Returns `decode_loss`, `rise_seconds` and `decode_level` of a `PowerLimit`.

    spent: large iterations that leave the clock at its lowest. first: seconds that a large iteration saves after a rest.
    """
    longest = laboratory.limits.max_request_tokens
    context = min(DECODE_CONTEXT, longest)
    batches = [Batch((), spread(number, context, longest)) for number in decode_counts]
    held = [batch for batch in batches if laboratory.holds(batch)] or [LIGHT]
    losses, rises, levels = [], [], []
    for batch in held:
        steady, number = laboratory.seconds(batch), _repeats(laboratory, batch, RISE_SECONDS)
        risen, _ = _saved(laboratory, [*spent, *[batch] * number, spent[-1]])
        settled, _ = _saved(laboratory, [*spent, *[batch] * _repeats(laboratory, batch, LEVEL_SECONDS), spent[-1]])
        levels.append(min(max(settled / first, LEAST), 1.0) if first else 1.0)
        rises.append(_time_constant(number * steady, risen, levels[-1] * first))
        settling = steady / rises[-1]
        # the loss at a constant clock exceeds the loss measured while the clock rises
        losses.append(_lost(laboratory, [*spent, batch]) / steady * (settling / -expm1(-settling)))
    numbers = tuple(float(len(batch.decodes)) for batch in held)
    loss, rise, level = (PiecewiseLinear(numbers, tuple(values)) for values in (losses, rises, levels))
    return loss, rise, level


def _at_full_and_lowest(saved: float, lost: float, reserve: float) -> tuple[float, float]:
    """Returns `gain` and `loss` of an iteration from the seconds saved after a rest and lost at the lowest clock."""
    both = saved + lost
    if not both or not reserve:
        return 0.0, 0.0
    swing = -reserve * log1p(-min(both / reserve, MOST))
    return swing * saved / both, swing * lost / both


def _time_constant(seconds: float, risen: float, first: float) -> float:
    """Returns the time constant of a clock that rises by `risen` of the distance `first` in these seconds.

    The share risen / first is clipped to [LEAST, MOST].
    """
    share = min(max(risen / first, LEAST), MOST) if first else MOST
    return -seconds / log1p(-share)


def _sizes(laboratory: Laboratory, bases: PiecewiseLinear) -> list[int]:
    """Returns the tokens of the iterations to measure: the smallest, and sizes at least a fifth larger than the preceding size."""
    sizes: list[int] = []
    for size, seconds in zip(map(int, bases.sizes), bases.seconds, strict=True):
        if not sizes or (size >= 1.2 * sizes[-1] and seconds <= LARGEST_SECONDS):
            sizes.append(size)
    return [size for size in sizes if laboratory.holds(Batch(prompts(size)))]


def _saved(laboratory: Laboratory, batches: Sequence[Batch], pause: float = 0.0) -> tuple[float, float]:
    """Returns the seconds that the last iteration saves compared to its steady state, and the pause before it."""
    taken = [laboratory.in_turn(batches, pause) for _ in range(REPEATS)]
    seconds, paused = median(seconds[-1] for seconds, _ in taken), median(paused for _, paused in taken)
    return laboratory.seconds(batches[-1]) - seconds, paused


def _reserve(laboratory: Laboratory, batches: Sequence[Batch]) -> float:
    """Returns the total seconds that the `FALLING` iterations save compared to the last `FALLEN` iterations."""
    taken = [laboratory.in_turn(batches)[0][-FALLING - FALLEN :] for _ in range(REPEATS)]
    seconds = [median(values) for values in zip(*taken, strict=True)]
    fallen = float(median(seconds[FALLING:]))
    return FALLING * fallen - float(sum(seconds[:FALLING]))


def _lost(laboratory: Laboratory, batches: Sequence[Batch]) -> float:
    """Returns the extra seconds of the last iteration compared to its steady state."""
    return max(-_saved(laboratory, batches)[0], 0.0)


def _repeats(laboratory: Laboratory, batch: Batch, seconds: float) -> int:
    return max(round(seconds / laboratory.seconds(batch)), 1)
