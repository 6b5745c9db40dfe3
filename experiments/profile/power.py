"""How the GPU's clock follows its power, measured: what iterations take after a rest, and after prompts that go on and on.

gain          light decodes, long enough | prompts: what they save
reserve       light decodes, long enough | two large iterations: by how much less the second saves
loss          large ones until nothing is saved | prompts, or decodes: what they take more
rise          large ones until nothing is saved | decodes, or a pause, of known length | a large one: what it saves again
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log1p
from statistics import median

from cbatch.sim.curve import Curve
from cbatch.sim.power import PowerLimit
from experiments.profile.batches import prompts
from experiments.profile.laboratory import Batch, Laboratory

LIGHT = Batch((), (1,))
"""What a GPU rests with."""

RESTED_SECONDS = 0.15
"""Of light iterations, or of large ones: longer than the clock takes to follow."""

RISE_SECONDS, PAUSE_SECONDS = 0.03, 0.005
"""Decodes, and a pause, after which the clock has risen in part."""

LARGE_SECONDS = 0.06
"""Of the large iteration, about: long enough to lower the clock, and short enough for what it saves to be seen."""

LARGEST_SECONDS = 0.12
"""Of the iterations that are looked at: of longer ones, what is saved drowns in what they vary by."""

DECODE_CONTEXT = 1056
"""Of each decode that is looked at, if requests may be so long."""

REPEATS = 3

LEAST, MOST = 0.05, 0.95
"""A part is held between these: what lies beyond says that something is over, or has not begun, but not by how much."""

NEARLY_ALL = 0.75
"""What saves more of the reserve than this says how large the reserve is, not what full clock is worth."""


def power_limit(laboratory: Laboratory, bases: Curve, decode_counts: Sequence[int]) -> PowerLimit:
    """
    Args:
        bases: seconds of mixed iterations in the lasting state, against tokens, as `measure` finds them.
        decode_counts: numbers of decodes to look at.
    """
    sizes = _sizes(laboratory, bases)
    rest = [LIGHT] * _repeats(laboratory, LIGHT, RESTED_SECONDS)
    saved = {size: max(_saved(laboratory, [*rest, Batch(prompts(size))])[0], 0.0) for size in sizes}
    large = min(sizes, key=lambda size: abs(laboratory.seconds(Batch(prompts(size))) - LARGE_SECONDS))
    batch, first = Batch(prompts(large)), saved[large]
    spent = [batch] * _repeats(laboratory, batch, RESTED_SECONDS)
    second, _ = _saved(laboratory, [*rest, batch, batch])
    reserve = max(first / (1 - _part(second, first)), *saved.values())
    told = [size for size in sizes if saved[size] <= NEARLY_ALL * reserve] or sizes[:1]
    gain = {size: _worth(saved[size], reserve) / laboratory.seconds(Batch(prompts(size))) for size in told}
    loss = {size: _lost(laboratory, [*spent, Batch(prompts(size))]) for size in told}
    decodes = _decodes(laboratory, decode_counts)
    rises = []
    for light in decodes:
        number = _repeats(laboratory, light, RISE_SECONDS)
        risen, _ = _saved(laboratory, [*spent, *[light] * number, batch])
        rises.append(_rise(number * laboratory.seconds(light), _part(risen, first)))
    risen, pause = _saved(laboratory, [*spent, batch], PAUSE_SECONDS)
    numbers = tuple(float(len(light.decodes)) for light in decodes)
    return PowerLimit(
        _curve(gain),
        _curve(loss),
        reserve,
        decode_loss=Curve(numbers, tuple(_lost(laboratory, [*spent, light]) for light in decodes)),
        rise_seconds=Curve(numbers, tuple(rises)),
        idle_rise_seconds=_rise(max(pause, PAUSE_SECONDS), _part(risen, first)),
    )


def _worth(saved: float, reserve: float) -> float:
    """Seconds that an iteration would save if the clock stayed full, of which it saves some as it lowers the clock itself."""
    return -reserve * log1p(-min(saved / reserve, MOST)) if reserve else 0.0


def _rise(seconds: float, part: float) -> float:
    """Seconds that leave the clock 1/e as far from full, if these make up for a part of the distance."""
    return -seconds / log1p(-part)


def _sizes(laboratory: Laboratory, bases: Curve) -> list[int]:
    """Tokens of the iterations to look at: a fifth apart at least, the shortest among them whatever it takes."""
    sizes: list[int] = []
    for size, seconds in zip(map(int, bases.sizes), bases.seconds, strict=True):
        if not sizes or (size >= 1.2 * sizes[-1] and seconds <= LARGEST_SECONDS):
            sizes.append(size)
    return [size for size in sizes if laboratory.holds(Batch(prompts(size)))]


def _decodes(laboratory: Laboratory, decode_counts: Sequence[int]) -> list[Batch]:
    """Decodes alone of these numbers, as many as fit."""
    context = min(DECODE_CONTEXT, laboratory.limits.max_request_tokens)
    batches = [Batch((), (context,) * number) for number in decode_counts]
    return [batch for batch in batches if laboratory.holds(batch)] or [LIGHT]


def _saved(laboratory: Laboratory, batches: Sequence[Batch], pause: float = 0.0) -> tuple[float, float]:
    """Seconds that the last of these iterations takes less than in its lasting state; and the pause before it, as it was."""
    taken = [laboratory.last_of(batches, pause) for _ in range(REPEATS)]
    seconds, paused = (median(values) for values in zip(*taken, strict=True))
    return laboratory.seconds(batches[-1]) - seconds, paused


def _lost(laboratory: Laboratory, batches: Sequence[Batch]) -> float:
    """Share of its seconds that the last of these iterations takes more than in its lasting state."""
    return max(-_saved(laboratory, batches)[0] / laboratory.seconds(batches[-1]), 0.0)


def _part(some: float, whole: float) -> float:
    return min(max(some / whole, LEAST), MOST) if whole else MOST


def _curve(values: dict[int, float]) -> Curve:
    return Curve(tuple(map(float, values)), tuple(values.values()))


def _repeats(laboratory: Laboratory, batch: Batch, seconds: float) -> int:
    return max(round(seconds / laboratory.seconds(batch)), 1)
