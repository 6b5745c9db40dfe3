r"""How fast a GPU computes depends on what it did before: it may draw more than its power limit only for a moment.

    reserve  full |----\            /-----
             none |     \__________/
                    full  throttled   decodes,
                    clock             or idle

Matrix products of many tokens draw more than the limit allows. At first they run at full clock; when what had been saved
up is spent, the clock falls until the draw is within the limit. Iterations of decodes alone, which wait for memory, and
pauses save up again; attention between the products of one iteration was not seen to. Measured on an H200, the same
iteration takes up to a fifth less after light ones than after its like.

The tables of a profile are of the lasting state; what is told here is how much less an iteration takes before that.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.sim.curve import Curve


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """
    share: of the seconds of an iteration's products and small operations, against tokens, what full clock would save.
    reserve_seconds: that are saved in all, after a rest, until the clock falls.
    recovery: seconds of the reserve that come back for each second of decodes alone.
    idle_recovery: for each second without work.
    """

    share: Curve
    reserve_seconds: float
    recovery: float
    idle_recovery: float

    def share_of(self, num_tokens: int) -> float:
        """Beyond the measured sizes the last one's holds."""
        return min(self.share.at(min(num_tokens, self.share.sizes[-1])), 1.0)


class PowerReserve:
    """What one GPU has saved up."""

    def __init__(self, limit: PowerLimit) -> None:
        self._limit = limit
        self._level = limit.reserve_seconds  # it begins rested

    def rest(self, seconds: float) -> None:
        """So long without work."""
        if seconds > 0:
            self._level = min(self._level + seconds * self._limit.idle_recovery, self._limit.reserve_seconds)

    def spend(self, wanted: float, returned: float) -> float:
        """Seconds that an iteration saves.

        Args:
            wanted: what it would save at full clock. returned: what it gives back.
        """
        found = self._level + returned
        saved = min(wanted, found)
        self._level = min(found - saved, self._limit.reserve_seconds)
        return saved
