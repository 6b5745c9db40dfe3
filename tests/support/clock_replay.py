"""The clock of one run, given to another: the same workload and policy then make the same plans on any executor.

Plans depend on time through arrivals (and through policies that look at `view.now`). `RecordedTimes` keeps every answer
of an executor's clock; `ReplayedTimes` lets another executor compute, but answers with those times.
"""

from collections.abc import Iterable
from typing import Any

from cbatch.errors import CbatchError
from cbatch.executor import Executor, Step, StepResult


class RecordedTimes:
    """An executor whose clock is written down in `times` (seconds, in the order of the calls)."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.num_stages = executor.num_stages
        self.needs_tokens = executor.needs_tokens
        self.times: list[float] = []

    def launch(self, step: Step) -> Any:
        return self.executor.launch(step)

    def wait(self, in_flight: Any) -> StepResult:
        return self.executor.wait(in_flight)

    def restart(self) -> None:
        self.executor.restart()

    def now(self) -> float:
        self.times.append(self.executor.now())
        return self.times[-1]

    def sleep_until(self, time: float) -> None:
        self.executor.sleep_until(time)

    def close(self) -> None:
        self.executor.close()


class ReplayedTimes(RecordedTimes):
    """An executor that computes as it does, while its clock shows the times of another run.

    Raises:
        CbatchError: from `now`, when the other run asked its clock less often, which means that its plans differed.
    """

    def __init__(self, executor: Executor, times: Iterable[float]) -> None:
        super().__init__(executor)
        self._left = iter(times)

    def now(self) -> float:
        time = next(self._left, None)
        if time is None:
            raise CbatchError("the replayed run is longer than the recorded one: their plans differ")
        self.times.append(time)
        return time

    def sleep_until(self, time: float) -> None:
        """The recorded clock has passed it already."""
