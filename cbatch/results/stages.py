"""Accounts for the seconds of each stage of a real pipeline by cause, from its events, as simulated stages do."""

from collections.abc import Iterator

from cbatch.cost import BatchShape
from cbatch.executor import StageSpans
from cbatch.record import RunRecord, StepRecord
from cbatch.sim.stages import Activity, Cause, Span, StageAccount, Stages


class MeasuredStages(Stages):
    """Accounts for stages whose times were measured; `record_host` is called as in simulation."""

    def observe(
        self, launched_at: float, shape: BatchShape, spans: StageSpans, *, full: bool, source: Span | None
    ) -> Span:
        """Accounts for an iteration's way through the stages.

        full: as many iterations are in flight as there are stages; otherwise a waiting stage has no work.
        source: the iteration `num_stages` earlier, whose tokens the first stage waits for.
        """
        computed, arrived = Cause.COMPUTE if full else Cause.NO_WORK, launched_at
        if source is not None and source.ended > arrived:
            self._trail.append((arrived, source.ended, computed, source.shape))
            arrived = source.ended
        bubbles = 0.0
        for stage, (account, (begin, end)) in enumerate(zip(self.accounts, spans, strict=True)):
            free_at = self._free_at[stage]
            if arrived < begin:  # copies of inputs, events, and peer stores that are under way
                self._trail.append((arrived, begin, Cause.SEND, shape))
            if free_at < begin:
                bubbles += self._account_idle(account, free_at, begin)
            account.compute += end - max(begin, free_at)
            self._free_at[stage] = arrived = end
            self._trail.append((begin, end, computed, shape))
        self._trail.clear()
        self._previous = shape
        return Span(spans[0][0], spans[-1][1], shape, bubbles)


def account_stages(record: RunRecord) -> list[StageAccount]:
    """Returns the time of each stage by cause, from the first plan to the end of the last iteration; empty without stages."""
    if not record.stages:
        return []
    num_stages = len(record.stages[0])
    stages = MeasuredStages(num_stages)
    begin = record.steps[0].planned_at
    stages._free_at = [begin] * num_stages
    host = _HostTrail(record, num_stages, begin)
    spans: list[Span] = []
    for number, (step, measured) in enumerate(zip(record.steps, record.stages, strict=True)):
        for activity in host.until(number):
            stages.record_host(*activity)
        source = spans[number - num_stages] if number >= num_stages else None
        full = number - host.num_completed + 1 >= num_stages
        spans.append(stages.observe(step.launched_at, _shape(step), measured, full=full, source=source))
    return stages.close_accounts()


class _HostTrail:
    """The host's activities, without gaps. num_completed: iterations whose tokens the host has received."""

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
    """Returns the part of the batch that determines the kind of a bubble: its prompt tokens."""
    return BatchShape(((step.num_prefill_tokens, 0),))
