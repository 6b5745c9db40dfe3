"""The simulated executor: no tokens, a virtual clock, and iteration times from a cost model.

The host's clock and the device's run side by side as in the real loop. Launching costs the host `host_seconds`; the
device begins a step when it has been launched and the step before has ended. A synchronous engine therefore pays host
and device time one after the other, an asynchronous one the larger of the two.
"""

from __future__ import annotations

from typing import NamedTuple

from cbatch.cost import CostModel
from cbatch.executor import Step, StepResult


class Span(NamedTuple):
    """When the device computes a step, in virtual seconds."""

    started: float
    ended: float


class SimExecutor:
    """Implements `cbatch.Executor` for one simulated GPU."""

    num_stages = 1
    needs_tokens = False

    def __init__(self, cost: CostModel, host_seconds: float = 0.0) -> None:
        """
        Args:
            cost: seconds of device time for a batch shape.
            host_seconds: host time that each iteration takes.
        """
        self.cost = cost
        self.host_seconds = host_seconds
        self._now = 0.0
        self._device_free_at = 0.0

    def launch(self, step: Step) -> Span:
        self._now += self.host_seconds
        started = max(self._now, self._device_free_at)
        self._device_free_at = started + self.cost.predict(step.shape())
        return Span(started, self._device_free_at)

    def wait(self, in_flight: Span) -> StepResult:
        self._now = max(self._now, in_flight.ended)
        return StepResult(None, in_flight.started, in_flight.ended)

    def now(self) -> float:
        return self._now

    def sleep_until(self, time: float) -> None:
        self._now = max(self._now, time)

    def close(self) -> None:
        """Nothing to give back."""
