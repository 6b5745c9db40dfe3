"""Deadlines by the objectives of requests: first tokens (QoServe, ASPLOS 2026), and next tokens (SLAI, arXiv 2508.01002)."""

from cbatch import Request, View

SLOWEST, OTHER_TBT = 1800.0, 0.4
"""Seconds, of requests without objectives and, between tokens, of those without one for the first token."""


def deadline(request: Request) -> float:
    """Seconds at which the first token is due; of requests that are not interactive, the last."""
    return request.arrival_time + (request.slo.ttft or request.slo.total or SLOWEST)


def misses(request: Request, output: float, prompt_rate: float, now: float) -> bool:
    """Whether a request that begins now misses its deadline. prompt_rate: tokens per second. output: predicted tokens."""
    due = deadline(request)
    if request.slo.ttft is None:
        due -= OTHER_TBT * output
    return now + request.num_ready / prompt_rate > due


class LastTimes:
    """The last schedulable times of decodes: when each must be computed, so that its next token comes in time."""

    def __init__(self, tbt: float) -> None:
        """tbt: seconds between tokens, for requests without an objective."""
        self.tbt = tbt
        self.times: dict[Request, float] = {}
        self._generated: dict[Request, int] = {}  # tokens when that was set

    def update(self, view: View, ahead: float) -> dict[Request, float]:
        """Sets the times of decodes that have received a token; returns all. ahead: seconds by which they come before they are due."""
        for request in view.decoding:
            generated = request.num_new_tokens
            if self._generated.get(request) != generated:
                self._generated[request] = generated
                self.times[request] = view.now + (request.slo.tbt or self.tbt) - ahead
        return self.times

    def forget(self, request: Request) -> None:
        self.times.pop(request, None)
        self._generated.pop(request, None)
