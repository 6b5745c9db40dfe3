r"""How fast a GPU computes depends on what it did before: it may draw more than its power limit only for a moment.

    clock  full |----\            /-----
                |     \__________/
         lowest |      prompts     decodes,
                                   or idle

Matrix products of many tokens draw more than the limit allows. At first they run at full clock; when what had been saved
up is spent, the clock has fallen until the draw is within the limit. Under decodes alone, which wait for memory, and in
pauses it rises again. Measured on an H200, the same iteration takes up to a sixth less after light ones than after its like,
and decodes up to a tenth more right after prompts than after decodes.

Each kind of iteration has a clock of its own, at which the GPU settles when it computes nothing else; every iteration draws
the clock towards its own. A profile's tables are of that steady state; what is told here is how much less or more an
iteration takes at another clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1
from typing import NamedTuple

from cbatch.sim.interpolation import Curve


class Pace(NamedTuple):
    """How the clock changes an iteration's time, and the iteration the clock.

    gain: seconds that it takes less at full clock than at its own. loss: seconds that it takes more at the lowest one. Time is
        taken as linear in the clock, so its own lies loss / (gain + loss) of the way from the lowest to the full one.
    settling: its duration in time constants of the clock: of the distance to its own, exp(-settling) is left.
    """

    gain: float
    loss: float
    settling: float


STEADY = Pace(0.0, 0.0, 0.0)
"""Of an iteration that takes as long at any clock."""


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """What was measured of how the clock follows the power.

    gain, loss: of a `Pace`, as shares of the seconds of products and small operations, against the iteration's tokens.
    reserve_seconds: saved in all by prompts one after the other, while the clock falls from the full to the lowest one.
    decode_loss: `loss` of decodes alone, as a share of their seconds but for the output head, against their number; their own
        clock is the full one.
    rise_seconds: time constant with which the clock rises under decodes alone, against their number.
    idle_rise_seconds: the same without work.
    """

    gain: Curve
    loss: Curve
    reserve_seconds: float
    decode_loss: Curve
    rise_seconds: Curve
    idle_rise_seconds: float

    def of_prompts(self, num_tokens: int, seconds: float) -> Pace:
        """seconds: of products and small operations, in the steady state."""
        if not self.reserve_seconds:
            return STEADY
        gain, loss = min(_held(self.gain, num_tokens), 1.0) * seconds, _held(self.loss, num_tokens) * seconds
        return Pace(gain, loss, (gain + loss) / self.reserve_seconds)

    def of_decodes(self, num_decodes: int, seconds: float) -> Pace:
        """seconds: of decodes alone, in the steady state."""
        return Pace(
            0.0, _held(self.decode_loss, num_decodes) * seconds, seconds / _held(self.rise_seconds, num_decodes)
        )


def _held(curve: Curve, size: float) -> float:
    """Beyond the measured sizes the last one's value holds."""
    return curve.at(min(size, curve.sizes[-1]))


class GpuClock:
    """The clock of one GPU, as a level: 1 is full, 0 the one that endless prompts come to. It begins full."""

    def __init__(self, limit: PowerLimit) -> None:
        self._idle_rise_seconds = limit.idle_rise_seconds
        self._level = 1.0

    def rest(self, seconds: float) -> None:
        """So long without work."""
        if seconds > 0:
            self._draw(1.0, seconds / self._idle_rise_seconds)

    def run(self, pace: Pace) -> float:
        """An iteration; seconds that it takes less than at its own clock, below 0 more.

        The clock moves while it runs, and at each moment saves in proportion to its distance from the iteration's own.
        """
        gain, loss, settling = pace
        swing = gain + loss
        own = loss / swing if swing else 1.0
        distance = self._level - own
        drawn = self._draw(own, settling)
        return swing * distance * (drawn / settling if settling else 1.0)

    def _draw(self, own: float, settling: float) -> float:
        """Draw the clock towards a level; the part of the distance that it goes."""
        drawn = -expm1(-settling)
        self._level -= (self._level - own) * drawn
        return drawn
