"""How the GPU's clock follows its power, measured: prompts after a rest, without one, and after rests of known length.

at full clock   decodes, long enough | one iteration with prompts
reserve         decodes, long enough | a large iteration: what it saves is all there was
recovery        large ones until nothing is saved | decodes, or a pause, of known length | a large one: what came back
lag             large ones until nothing is saved | decodes: what they take longer at first, and after some more of them
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import median

from cbatch.sim.curve import Curve
from cbatch.sim.power import PowerLimit
from experiments.profile.batches import prompts
from experiments.profile.laboratory import Batch, Laboratory

LIGHT = Batch((), (1,))
"""What a GPU rests with."""

RESTED_SECONDS = 0.15
"""Of light iterations, or of a large one: longer than the clock takes to follow."""

SHORT_SECONDS, PAUSE_SECONDS = 0.02, 0.005
"""Light iterations, and a pause, after which the reserve is partly back."""

LARGEST_SECONDS = 0.12
"""Of the iterations that are looked at: of longer ones, what is saved drowns in what they vary by."""

LAG_SECONDS = 0.04
"""Decodes after which the clock is looked at again."""

DECODE_CONTEXT = 1056
"""Of each decode that is looked at, if requests may be so long."""

REPEATS = 3
NEARLY_ALL = 0.75
"""A saving above this share of the largest one is bounded by the reserve, not by the iteration."""


def power_limit(laboratory: Laboratory, bases: Curve, decode_counts: Sequence[int]) -> PowerLimit:
    """
    Args:
        bases: seconds of mixed iterations in the lasting state, against tokens, as `measure` finds them.
        decode_counts: numbers of decodes to look at.
    """
    sizes = _sizes(laboratory, bases)
    rested = _repeats(laboratory, LIGHT, RESTED_SECONDS)
    saved = {size: _saved(laboratory, size, [LIGHT] * rested)[0] for size in sizes}
    reserve = median(sorted(saved.values())[-3:])
    free = {size: seconds for size, seconds in saved.items() if seconds < NEARLY_ALL * reserve}
    shares = {size: seconds / laboratory.seconds(Batch(prompts(size))) for size, seconds in free.items()}
    curve = Curve(tuple(shares), tuple(shares.values())) if shares else Curve((sizes[0],), (0.0,))
    largest = max(saved, key=saved.__getitem__)
    spent = [Batch(prompts(largest))] * _repeats(laboratory, Batch(prompts(largest)), RESTED_SECONDS)
    short = _repeats(laboratory, LIGHT, SHORT_SECONDS)
    light_seconds = short * laboratory.seconds(LIGHT)
    after_light, _ = _saved(laboratory, largest, [*spent, *[LIGHT] * short])
    after_pause, pause = _saved(laboratory, largest, spent, PAUSE_SECONDS)
    lag, lag_seconds = _lag(laboratory, decode_counts, spent)
    return PowerLimit(
        curve,
        reserve,
        recovery=min(after_light / light_seconds, 1.0),
        idle_recovery=min(after_pause / pause, 1.0) if pause else 0.0,
        lag=lag,
        lag_seconds=lag_seconds,
    )


def _sizes(laboratory: Laboratory, bases: Curve) -> list[int]:
    """Tokens of the iterations to look at: a fifth apart at least, the shortest among them whatever it takes."""
    sizes: list[int] = []
    for size, seconds in zip(map(int, bases.sizes), bases.seconds, strict=True):
        if not sizes or (size >= 1.2 * sizes[-1] and seconds <= LARGEST_SECONDS):
            sizes.append(size)
    return [size for size in sizes if laboratory.holds(Batch(prompts(size)))]


def _saved(laboratory: Laboratory, size: int, before: Sequence[Batch], pause: float = 0.0) -> tuple[float, float]:
    """Seconds that prompts of `size` tokens take less after those iterations than in the lasting state, at least 0; the pause."""
    batch = Batch(prompts(size))
    taken = [laboratory.last_of([*before, batch], pause) for _ in range(REPEATS)]
    seconds, paused = (median(values) for values in zip(*taken, strict=True))
    return max(laboratory.seconds(batch) - seconds, 0.0), paused


def _lag(laboratory: Laboratory, decode_counts: Sequence[int], spent: Sequence[Batch]) -> tuple[Curve, float]:
    """`lag` and `lag_seconds` of a `PowerLimit`; spent: prompts that leave no reserve."""

    def share_after(before: Sequence[Batch], batch: Batch) -> float:
        taken = median(laboratory.last_of([*before, batch])[0] for _ in range(REPEATS))
        return max(taken / laboratory.seconds(batch) - 1, 0.0)

    context = min(DECODE_CONTEXT, laboratory.limits.max_request_tokens)
    batches = [Batch((), (context,) * number) for number in decode_counts]
    shares = {batch: share_after(spent, batch) for batch in batches if laboratory.holds(batch)}
    lag = Curve(tuple(float(len(batch.decodes)) for batch in shares), tuple(shares.values()))
    slowest = max(shares, key=shares.__getitem__)
    more = _repeats(laboratory, slowest, LAG_SECONDS)
    later = share_after([*spent, *[slowest] * more], slowest)
    if not 0 < later < shares[slowest]:  # it is over by then, or nothing is seen of it
        return lag, LAG_SECONDS / 4
    return lag, more * laboratory.seconds(slowest) / log(shares[slowest] / later)


def _repeats(laboratory: Laboratory, batch: Batch, seconds: float) -> int:
    return max(round(seconds / laboratory.seconds(batch)), 1)
