"""The simulated executor: no tokens, a virtual clock, and iteration times from a cost model.

The host's clock and the device's run side by side as in the real loop. Launching costs host time; the device begins a
step when it has been launched and the step before has ended. A synchronous engine therefore pays host and device time
one after the other, an asynchronous one the larger of the two. With pipeline stages, as many steps are under way.

Where the profile tells how the GPU's clock follows its power, an iteration's time also depends on those before it: see
`cbatch.sim.power`.
"""

from __future__ import annotations

from collections import deque

from cbatch.cost import BatchShape, CostModel
from cbatch.executor import Step, StepResult
from cbatch.sim.cost import ProfileCost, StageTimes
from cbatch.sim.power import GpuClock
from cbatch.sim.profile import HostTime
from cbatch.sim.stages import Span, StageAccount, Stages, Why


class SimExecutor:
    """Implements `cbatch.Executor` for simulated GPUs: one replica, of any tensor-parallel degree and number of stages."""

    needs_tokens = False

    def __init__(self, cost: CostModel, host: HostTime | float = 0.0) -> None:
        """
        Args:
            cost: seconds of device time for a batch shape; a `ProfileCost` brings its topology along, any other is one GPU.
            host: host time that each iteration takes; a number is seconds, whatever the batch.
        """
        self.cost = cost
        self.host = host if isinstance(host, HostTime) else HostTime(host)
        self.num_stages = cost.topology.pipeline_stages if isinstance(cost, ProfileCost) else 1
        self._execute = cost.execute if isinstance(cost, ProfileCost) else self._execute_on_one
        self._stages = Stages(self.num_stages)
        self._now = 0.0
        self._num_in_flight = 0
        self._latest: deque[Span] = deque(maxlen=self.num_stages)
        power = cost.power if isinstance(cost, ProfileCost) else None
        self._gpu_clock = GpuClock(power) if power is not None else None

    def launch(self, step: Step) -> Span:
        shape = step.shape()
        times = self._execute(shape)
        self._advance(self._now + self.host.of(len(step.requests)), Why.HOST)
        if self._gpu_clock is not None:
            times = self._at_its_clock(times, self._gpu_clock)
        carried_from = None
        if self.num_stages > 1 and len(self._latest) == self.num_stages and (step.carry >= 0).any():
            carried_from = self._latest[0]
        self._num_in_flight += 1
        full = self._num_in_flight >= self.num_stages
        span = self._stages.launch(self._now, shape, times, full=full, carried_from=carried_from)
        self._latest.append(span)
        return span

    def wait(self, in_flight: Span) -> StepResult:
        full = self._num_in_flight >= self.num_stages
        self._advance(in_flight.ended, Why.COMPUTED if full else Why.NO_WORK, in_flight.shape)
        self._num_in_flight -= 1
        return StepResult(None, in_flight.started, in_flight.ended)

    def now(self) -> float:
        return self._now

    def sleep_until(self, time: float) -> None:
        self._advance(time, Why.NO_WORK)

    def close(self) -> None:
        """Nothing to give back."""

    def accounts(self) -> list[StageAccount]:
        """Where the time of each stage went, from 0 to the end of the last iteration."""
        return self._stages.closed()

    def _advance(self, time: float, why: Why, shape: BatchShape = BatchShape()) -> None:  # noqa: B008 - a tuple
        if time > self._now:
            if why is not Why.COMPUTED or self.num_stages > 1:  # the only stage is at work while the host waits for it
                self._stages.host_was(self._now, time, why, shape)
            self._now = time

    def _at_its_clock(self, times: StageTimes, clock: GpuClock) -> StageTimes:
        """The times at the clock that the GPU can afford. All stages do the same work, so one stands for all."""
        clock.rest(self._now - (self._latest[-1].ended if self._latest else 0.0))
        return times._replace(compute=times.compute - clock.run(times.pace))

    def _execute_on_one(self, shape: BatchShape) -> StageTimes:
        return StageTimes(self.cost.predict(shape), 0.0, 0.0, 0.0, ())
