"""What each stage of a simulated pipeline did at each time: the intervals whose sums `cbatch.sim.stages` keeps."""

from dataclasses import replace
from typing import NamedTuple

from cbatch import Step
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from cbatch.sim.stages import Span

_IN_ORDER = ("no_work", "host", "pb1", "pb2", "pb3", "communication", "compute")


class Interval(NamedTuple):
    """What a stage did for `milliseconds`. doing: a field of `StageAccount`; idle intervals end with `iteration`."""

    iteration: int
    stage: int
    begin: float
    doing: str
    milliseconds: float


class Calendar(SimExecutor):
    """Records the intervals of every stage. Assumes no all-reduces: a stage computes, or waits."""

    def __init__(self, cost: ProfileCost) -> None:
        super().__init__(cost)
        self.intervals: list[Interval] = []

    def launch(self, step: Step) -> Span:
        before = [replace(account) for account in self._stages.accounts]
        span = super().launch(step)
        for stage, (past, account) in enumerate(zip(before, self._stages.accounts, strict=True)):
            begin = 1e3 * past.span  # an account's seconds sum to its span
            for doing in _IN_ORDER:
                milliseconds = 1e3 * (getattr(account, doing) - getattr(past, doing))
                if milliseconds > 0:
                    self.intervals.append(Interval(step.index, stage, begin, doing, milliseconds))
                    begin += milliseconds
        return span
