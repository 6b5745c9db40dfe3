"""The time that a policy's own code takes to plan, measured on this machine and charged in simulation."""

from collections.abc import Callable
from functools import wraps
from time import thread_time
from typing import Any

from cbatch.executor import Step
from cbatch.sim.executor import SimExecutor
from cbatch.sim.stages import Cause, Span


class PlanningExecutor(SimExecutor):
    """Simulated GPUs whose host also spends on each plan the time that the policy's code takes on this machine.

    num_plans, planning_seconds: plans that were launched, and the processor time that they took.
    delay_seconds: by which the device began iterations later: the planning time beyond the device's slack.
    """

    def restart(self) -> None:
        super().restart()
        self.num_plans, self.planning_seconds, self.delay_seconds = 0, 0.0, 0.0
        self._latest_plan = 0.0  # seconds

    def timed(self, plan: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @wraps(plan)
        def timed_plan(view: Any) -> Any:
            began = thread_time()
            made = plan(view)
            self._latest_plan = thread_time() - began
            return made

        return timed_plan

    def launch(self, step: Step) -> Span:
        """As `SimExecutor.launch`, which a leap never replaces here: every iteration is planned, as a real engine does."""
        could_begin = max(self._now + self.host.of(len(step.requests)), self._stages.free_at)
        self._advance(self._now + self._latest_plan, Cause.HOST)
        begins = max(self._now + self.host.of(len(step.requests)), self._stages.free_at)
        self.num_plans += 1
        self.planning_seconds += self._latest_plan
        self.delay_seconds += begins - could_begin
        return super().launch(step)
