r"""How fast a GPU computes depends on what it did before: it may draw more than its power limit only for a moment.

    clock  full |----\            /-----
                |     \__________/
         lowest |      prompts     decodes,
                                   or idle

Matrix products of many tokens draw more than the limit allows. At first they run at full clock; when what had been saved
up is spent, the clock has fallen until the draw is within the limit. Under decodes alone, which wait for memory, and in
pauses it rises again. Measured on an H200, the same iteration takes up to a sixth less after light ones than after its like,
and decodes up to a tenth more right after prompts than after decodes.

Every kind of iteration has a clock of its own, at which it lasts, and each draws the clock towards it. Its entry in a
profile's tables is what it takes there; what is told here is how much less or more it takes at another.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1
from typing import NamedTuple

from cbatch.sim.curve import Curve


class Pace(NamedTuple):
    """What the clock is to an iteration, and the iteration to the clock.

    gain: seconds that it takes less at full clock than at its own. loss: more at the lowest one.
    settling: how far it draws the clock towards its own: of the distance, exp(-settling) is left.
    """

    gain: float
    loss: float
    settling: float


STEADY = Pace(0.0, 0.0, 0.0)
"""Of an iteration that takes as long at any clock."""


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """
    gain, loss: of a `Pace`, as shares of the seconds of an iteration's products and small operations, against its tokens.
    reserve_seconds: that prompts save in all, one after the other, until a full clock has become the lowest.
    decode_loss: `loss` of decodes alone, as a share of all their seconds, against their number; their own clock is the full one.
    rise_seconds: of decodes alone, against their number, that leave the clock 1/e as far from full.
    idle_rise_seconds: the same without work.
    """

    gain: Curve
    loss: Curve
    reserve_seconds: float
    decode_loss: Curve
    rise_seconds: Curve
    idle_rise_seconds: float

    def of_prompts(self, num_tokens: int, seconds: float) -> Pace:
        """seconds: of products and small operations, in the lasting state."""
        gain, loss = (min(_held(curve, num_tokens), 1.0) * seconds for curve in (self.gain, self.loss))
        return Pace(gain, loss, (gain + loss) / self.reserve_seconds if self.reserve_seconds else 0.0)

    def of_decodes(self, num_decodes: int, seconds: float) -> Pace:
        """seconds: of decodes alone, in the lasting state."""
        return Pace(
            0.0, _held(self.decode_loss, num_decodes) * seconds, seconds / _held(self.rise_seconds, num_decodes)
        )


def _held(curve: Curve, size: float) -> float:
    """Beyond the measured sizes the last one's value holds."""
    return curve.at(min(size, curve.sizes[-1]))


class Clock:
    """Of one GPU, between the lowest, which prompts without end come to, at 0, and the full one at 1. It begins full."""

    def __init__(self, limit: PowerLimit) -> None:
        self._idle_rise_seconds = limit.idle_rise_seconds
        self._level = 1.0

    def rest(self, seconds: float) -> None:
        """So long without work."""
        if seconds > 0:
            self._settle(1.0, seconds / self._idle_rise_seconds)

    def run(self, pace: Pace) -> float:
        """An iteration; seconds that it takes less than at its own clock, below 0 more.

        The clock moves while it runs, and at each moment saves in proportion to its distance from the iteration's own.
        """
        gain, loss, settling = pace
        swing = gain + loss
        own = loss / swing if swing else 1.0
        distance = self._level - own
        self._settle(own, settling)
        return swing * distance * (-expm1(-settling) / settling if settling else 1.0)

    def _settle(self, own: float, settling: float) -> None:
        self._level += (self._level - own) * expm1(-settling)
