r"""How fast a GPU computes depends on what it did before: it may draw more than its power limit only for a moment.

    reserve  full |----\            /-----
             none |     \__________/
                    full  throttled   decodes,
                    clock             or idle

Matrix products of many tokens draw more than the limit allows. At first they run at full clock; when what had been saved
up is spent, the clock falls until the draw is within the limit. Iterations of decodes alone, which wait for memory, and
pauses save up again; attention between the products of one iteration was not seen to. Measured on an H200, the same
iteration takes up to a sixth less after light ones than after its like.

The tables of a profile are of the lasting state; what is told here is how much less an iteration takes before that, and how
much more decodes take while the clock still rises after prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from cbatch.sim.curve import Curve


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """
    share: of the seconds of an iteration's products and small operations, against tokens, what full clock would save.
    reserve_seconds: that are saved in all, after a rest, until the clock falls.
    recovery: seconds of the reserve that come back for each second of decodes alone.
    idle_recovery: for each second without work.
    lag: share of their seconds by which decodes alone take longer right after prompts that left no reserve, against their
        number; None: not measured. lag_seconds: of decodes or without work, in which that falls to 1/e.
    """

    share: Curve
    reserve_seconds: float
    recovery: float
    idle_recovery: float
    lag: Curve | None = None
    lag_seconds: float = 1.0

    def share_of(self, num_tokens: int) -> float:
        """Beyond the measured sizes the last one's holds."""
        return min(self.share.at(min(num_tokens, self.share.sizes[-1])), 1.0)

    def lag_of(self, num_decodes: int) -> float:
        """Beyond the measured numbers the last one's holds."""
        return 0.0 if self.lag is None else self.lag.at(min(num_decodes, self.lag.sizes[-1]))


class PowerReserve:
    """What one GPU has saved up, and how low its clock still is."""

    def __init__(self, limit: PowerLimit) -> None:
        self._limit = limit
        self._level = limit.reserve_seconds  # it begins rested
        self._low = 0.0  # 1: the clock of prompts that left no reserve

    def rest(self, seconds: float) -> None:
        """So long without work."""
        if seconds > 0:
            self._level = min(self._level + seconds * self._limit.idle_recovery, self._limit.reserve_seconds)
            self._rise(seconds)

    def spend(self, seconds: float, *, gain: float, relief: float, lag: float) -> float:
        """Seconds that an iteration saves; below 0, that it loses.

        Args:
            seconds: that it takes in the lasting state. gain: what it would save of them at full clock. relief: what it gives
                back. lag: what it would lose right after prompts that left no reserve.
        """
        found = self._level + relief
        saved = min(gain, found)
        self._level = min(found - saved, self._limit.reserve_seconds)
        if gain:
            self._low = max(
                self._low, 1 - self._level / self._limit.reserve_seconds if self._limit.reserve_seconds else 1.0
            )
            return saved
        lost = lag * self._low
        self._rise(seconds + lost)
        return saved - lost

    def _rise(self, seconds: float) -> None:
        self._low *= exp(-seconds / self._limit.lag_seconds)
