"""Attributes the seconds of each stage of a real pipeline to causes, from recorded events, like `sim.stages` in simulation."""

from collections.abc import Iterator

from cbatch.cost import BatchShape
from cbatch.record import RunRecord, StepRecord
from cbatch.sim.stages import Activity, Cause, Span, StageAccount, Stages


def account_stages(record: RunRecord) -> list[StageAccount]:
    """Returns the time of each stage by cause, from the first plan to the last iteration's end; empty without stages."""
    if not record.stages:
        return []
    num_stages = len(record.stages[0])
    begin = record.steps[0].planned_at
    stages = Stages(num_stages, begin)
    host = _HostTrail(record, num_stages, begin)
    spans: list[Span] = []
    for number, (step, measured) in enumerate(zip(record.steps, record.stages, strict=True)):
        for activity in host.until(number):
            stages.record_host(*activity)
        source = spans[number - num_stages] if number >= num_stages else None
        full = number - host.num_completed + 1 >= num_stages
        spans.append(stages.record(step.launched_at, _shape(step), measured, full=full, carried_from=source))
    return stages.close_accounts()


class _HostTrail:
    """The host's activities, without gaps. num_completed: number of iterations whose tokens the host has received."""

    def __init__(self, record: RunRecord, num_stages: int, begin: float) -> None:
        self._steps, self._num_stages, self._now = record.steps, num_stages, begin
        self.num_completed = 0

    def until(self, number: int) -> Iterator[Activity]:
        """Yields the activities since the last launch, up to the launch of iteration `number`."""
        launched = self._steps[number]
        while self.num_completed < number and self._steps[self.num_completed].received_at <= launched.planned_at:
            step, num_in_flight = self._steps[self.num_completed], number - self.num_completed
            waiting = Cause.COMPUTE if num_in_flight >= self._num_stages else Cause.NO_WORK
            yield from self._advance(step.waited_at, Cause.HOST)
            yield from self._advance(step.received_at, waiting, _shape(step))
            yield from self._advance(step.done_at, Cause.HOST)
            self.num_completed += 1
        idle = self.num_completed == number  # nothing was in flight
        yield from self._advance(launched.planned_at, Cause.NO_WORK if idle else Cause.HOST)
        yield from self._advance(launched.launched_at, Cause.HOST)

    def _advance(self, time: float, cause: Cause, shape: BatchShape = BatchShape()) -> Iterator[Activity]:  # noqa: B008
        if time > self._now:
            yield self._now, time, cause, shape
            self._now = time


def _shape(step: StepRecord) -> BatchShape:
    """Returns the batch reduced to its prompt tokens, which determine the kind of a bubble."""
    return BatchShape(((step.num_prefill_tokens, 0),))
