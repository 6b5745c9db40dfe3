"""How long iterations take: as a policy learns it from their records (`on_step`), and what a cost model asks of a plan."""

from cbatch import BatchShape, Plan, StepRecord


class StepTimes:
    """mean: seconds of an iteration, over all. prompt_rate: prompt tokens per second, a moving average."""

    def __init__(self, prompt_rate: float = 0.0, smoothing: float = 0.0) -> None:
        """prompt_rate: to begin with. smoothing: weight of the average so far, beside that of a new iteration."""
        self.prompt_rate, self.smoothing, self.mean = prompt_rate, smoothing, 0.0
        self._seconds, self._steps, self._received_at = 0.0, 0, 0.0

    def note(self, record: StepRecord) -> None:
        """Iterations in flight overlap: each counts from the end of the one before."""
        seconds = record.received_at - max(self._received_at, record.launched_at)
        self._received_at = record.received_at
        self._seconds, self._steps = self._seconds + seconds, self._steps + 1
        self.mean = self._seconds / self._steps
        if record.num_prefill_tokens and seconds > 0:
            new = record.num_prefill_tokens / seconds
            self.prompt_rate = self.smoothing * self.prompt_rate + (1 - self.smoothing) * new


def shape_of(plan: Plan) -> BatchShape:
    """The shape of a plan's iteration. A last prompt token that is computed by itself counts as a decode."""
    chunks = tuple((tokens, request.num_computed) for request, tokens in plan if tokens > 1)
    decodes = [request for request, tokens in plan if tokens == 1]
    return BatchShape(chunks, len(decodes), sum(request.num_tokens for request in decodes))
