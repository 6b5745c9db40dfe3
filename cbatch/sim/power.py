r"""A GPU under its power limit: its speed depends on the preceding iterations.

    clock  full |----\            /-----
                |     \__________/
         lowest |      prompts     decodes,
                                   or idle

Matrix products of many tokens draw more power than the limit allows. They start at full clock, and the clock falls
until the average power is within the limit. It rises again during pauses and iterations of decodes alone, which wait
for memory. On an H200 the same iteration takes up to a sixth less after light iterations than after similar ones, and
decodes take up to a tenth more right after prompts than after decodes.

Each kind of iteration has its own clock, at which the GPU settles if it computes nothing else; every iteration draws
the clock towards its own. A profile's tables describe this steady state; this module describes other clocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import expm1
from typing import Annotated, NamedTuple

from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.schema import Columns, NotNegative, Positive


class Pace(NamedTuple):
    """How the clock changes an iteration's time, and the iteration the clock.

    gain: seconds saved at full clock. loss: extra seconds at the lowest clock. Time is assumed linear in the clock, so
        an iteration's own clock lies loss / (gain + loss) of the way from the lowest to the full clock.
    settling: its duration in time constants of the clock; exp(-settling) of the distance to its own clock remains.
    """

    gain: float
    loss: float
    settling: float


STEADY = Pace(0.0, 0.0, 0.0)
"""An iteration that does not depend on the clock."""


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """Measurements of how the clock follows the power.

    gain, loss: those of a `Pace`, as shares of the seconds of products and small operations, against the iteration's tokens.
    reserve_seconds: total seconds saved by consecutive prompts while the clock falls from full to lowest.
    decode_loss: `loss` of decodes alone, as a share of their seconds without the output head, against their number;
        their own clock is the full one.
    rise_seconds: time constant of the clock's rise during decodes alone, against their number.
    idle_rise_seconds: the same when idle.
    """

    gain: Annotated[PiecewiseLinear, Columns("tokens", "share")]
    loss: Annotated[PiecewiseLinear, Columns("tokens", "share")]
    reserve_seconds: NotNegative
    decode_loss: Annotated[PiecewiseLinear, Columns("requests", "share")]
    rise_seconds: Annotated[PiecewiseLinear, Columns("requests", positive=True)]
    idle_rise_seconds: Positive

    def of_prompts(self, num_tokens: int, seconds: float) -> Pace:
        """The pace of an iteration with prompts. seconds: products and small operations, in the steady state."""
        if not self.reserve_seconds:
            return STEADY
        gain, loss = min(_held(self.gain, num_tokens), 1.0) * seconds, _held(self.loss, num_tokens) * seconds
        return Pace(gain, loss, (gain + loss) / self.reserve_seconds)

    def of_decodes(self, num_decodes: int) -> Callable[[float], Pace]:
        """Returns the pace of this many decodes alone as a function of their seconds in the steady state."""
        loss, rise = _held(self.decode_loss, num_decodes), _held(self.rise_seconds, num_decodes)
        return lambda seconds: Pace(0.0, loss * seconds, seconds / rise)


def _held(curve: PiecewiseLinear, size: float) -> float:
    """The value at a size; beyond the measured sizes the last value holds."""
    return curve.at(min(size, curve.sizes[-1]))


class GpuClock:
    """The clock of one GPU as a level: 1 is full, 0 is where endless prompts settle. It starts at 1."""

    def __init__(self, limit: PowerLimit) -> None:
        self._idle_rise_seconds = limit.idle_rise_seconds
        self._level = 1.0

    def rest(self, seconds: float) -> None:
        """Advance by an idle time."""
        if seconds > 0:
            self._draw(1.0, seconds / self._idle_rise_seconds)

    def run(self, pace: Pace) -> float:
        """Advance by an iteration; returns the seconds that it saves compared to its own clock, negative if it loses.

        The clock moves while the iteration runs; the saving is always proportional to its distance from the own clock.
        """
        gain, loss, settling = pace
        swing = gain + loss
        own = loss / swing if swing else 1.0
        distance = self._level - own
        drawn = self._draw(own, settling)
        return swing * distance * (drawn / settling if settling else 1.0)

    def _draw(self, own: float, settling: float) -> float:
        """Move the clock towards a level; returns the covered part of the distance."""
        drawn = -expm1(-settling)
        self._level -= (self._level - own) * drawn
        return drawn
