"""The times of iterations, learned from their records (`on_step`), and the shape of a plan for a cost model."""

from cbatch import BatchShape, Plan, StepRecord


class StepTimes:
    """mean: mean seconds of all iterations. prompt_rate: moving average of prompt tokens per second."""

    def __init__(self, prompt_rate: float = 0.0, smoothing: float = 0.0) -> None:
        """prompt_rate: initial value. smoothing: weight of the average so far, relative to a new iteration."""
        self.prompt_rate, self.smoothing, self.mean = prompt_rate, smoothing, 0.0
        self._seconds, self._steps, self._received_at = 0.0, 0, 0.0

    def note(self, record: StepRecord) -> None:
        """Adds an iteration. Iterations in flight overlap, so each counts from the end of the preceding iteration."""
        seconds = record.received_at - max(self._received_at, record.launched_at)
        self._received_at = record.received_at
        self._seconds, self._steps = self._seconds + seconds, self._steps + 1
        self.mean = self._seconds / self._steps
        if record.num_prefill_tokens and seconds > 0:
            new = record.num_prefill_tokens / seconds
            self.prompt_rate = self.smoothing * self.prompt_rate + (1 - self.smoothing) * new


def shape_of(plan: Plan) -> BatchShape:
    """Returns the shape of a plan's iteration. A prompt's token that is computed by itself counts as a decode."""
    chunks = tuple((tokens, request.num_computed) for request, tokens in plan if tokens > 1)
    contexts = [request.num_computed + 1 for request, tokens in plan if tokens == 1]
    return BatchShape(chunks, len(contexts), sum(contexts))
