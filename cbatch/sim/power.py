r"""A GPU at its power limit, whose speed depends on the preceding iterations.

    clock  full |----\            /-----
                |     \__________/
         lowest |      prompts     decodes,
                                   or idle

Matrix products of many tokens draw more power than the limit allows. They start at full clock, and the clock falls until
the average power is within the limit. The clock rises again during pauses and decode-only iterations, which are bound by
memory. On an H200 an iteration takes up to a sixth less time after light iterations than after similar iterations, and
decodes take up to a tenth more time right after prompts than after decodes.

Each kind of iteration has a steady clock, at which the GPU settles if it computes nothing else: few decodes at the full clock, many below it.
Every iteration moves the clock towards its steady clock. A profile's tables describe this steady state; this module describes other clocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import expm1
from typing import Annotated, NamedTuple

from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.schema import NotNegative, Positive, TableColumns


class Pace(NamedTuple):
    """How the clock changes an iteration's time, and how the iteration changes the clock.

    gain: seconds saved at full clock. loss: extra seconds at the lowest clock. Time is assumed linear in the clock, so
        the steady clock lies loss / (gain + loss) of the way from the lowest to the full clock.
    settling: duration in time constants of the clock; exp(-settling) of the distance to the steady clock remains.
    """

    gain: float
    loss: float
    settling: float


STEADY = Pace(0.0, 0.0, 0.0)  # an iteration that does not depend on the clock


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """Measurements of how the clock follows the power.

    gain, loss: as in `Pace`, as shares of the seconds of products and small operations, against the iteration's tokens.
    reserve_seconds: total seconds saved by consecutive prompts while the clock falls from full to lowest.
    decode_loss: `loss` of decode-only iterations, as a share of their seconds without the output head, against the number
        of decodes.
    decode_level: their steady clock, as a share of the way from the lowest to the full clock, against the number of decodes; None: full.
    rise_seconds: time constant of the clock's rise during decode-only iterations, against the number of decodes.
    idle_rise_seconds: time constant of the clock's rise when idle.
    """

    gain: Annotated[PiecewiseLinear, TableColumns("tokens", "share")]
    loss: Annotated[PiecewiseLinear, TableColumns("tokens", "share")]
    reserve_seconds: NotNegative
    decode_loss: Annotated[PiecewiseLinear, TableColumns("requests", "share")]
    rise_seconds: Annotated[PiecewiseLinear, TableColumns("requests", positive=True)]
    idle_rise_seconds: Positive
    decode_level: Annotated[PiecewiseLinear, TableColumns("requests", "share", positive=True)] | None = None

    def of_prompts(self, num_tokens: int, seconds: float) -> Pace:
        """Returns the pace of an iteration with prompts. seconds: of products and small operations, in the steady state."""
        if not self.reserve_seconds:
            return STEADY
        gain, loss = min(_held(self.gain, num_tokens), 1.0) * seconds, _held(self.loss, num_tokens) * seconds
        return Pace(gain, loss, (gain + loss) / self.reserve_seconds)

    def of_decodes(self, num_decodes: int) -> Callable[[float], Pace]:
        """Returns the pace of a decode-only iteration as a function of its seconds in the steady state."""
        loss, rise = _held(self.decode_loss, num_decodes), _held(self.rise_seconds, num_decodes)
        level = _held(self.decode_level, num_decodes) if self.decode_level else 1.0
        gain = loss / level - loss
        return lambda seconds: Pace(gain * seconds, loss * seconds, seconds / rise)


def _held(curve: PiecewiseLinear, size: float) -> float:
    """Returns the value at a size; beyond the measured sizes the last value holds."""
    return curve.at(min(size, curve.sizes[-1]))


class GpuClock:
    """The clock of one GPU as a level that starts at 1: 1 is full, 0 is where endless prompts settle."""

    def __init__(self, limit: PowerLimit) -> None:
        self._idle_rise_seconds = limit.idle_rise_seconds
        self._level = 1.0

    def rest(self, seconds: float) -> None:
        """Advances the clock by an idle time."""
        if seconds > 0:
            self._level -= (self._level - 1.0) * -expm1(-seconds / self._idle_rise_seconds)

    def run(self, pace: Pace) -> float:
        """Advances the clock by an iteration. Returns the seconds saved compared to the steady clock; a loss is negative.

        The clock moves during the iteration; the saving rate is proportional to the distance from the steady clock.
        """
        gain, loss, settling = pace
        swing = gain + loss
        steady = loss / swing if swing else 1.0
        distance = self._level - steady
        covered = -expm1(-settling)
        self._level -= distance * covered
        return swing * distance * (covered / settling if settling else 1.0)
