"""Deadlines from requests' objectives, for first tokens (QoServe, ASPLOS 2026) and next tokens (SLAI, arXiv 2508.01002)."""

from cbatch import Request, View

SLOWEST, OTHER_TBT = 1800.0, 0.4
"""Seconds: the deadline of requests without objectives; the time between tokens of requests without a first-token objective."""


def deadline(request: Request) -> float:
    """Returns when the first token is due, in seconds; for requests that are not interactive, the last token."""
    return request.arrival_time + (request.slo.ttft or request.slo.total or SLOWEST)


def misses(request: Request, output: float, prompt_rate: float, now: float) -> bool:
    """Returns whether a request that begins now misses its deadline. prompt_rate: tokens per second. output: predicted tokens."""
    due = deadline(request)
    if request.slo.ttft is None:
        due -= OTHER_TBT * output
    return now + request.num_ready / prompt_rate > due


class LastTimes:
    """The last schedulable time of each decode, at which it must be computed so that its next token is in time."""

    def __init__(self, tbt: float) -> None:
        """tbt: seconds between tokens, for requests without an objective."""
        self.tbt = tbt
        self.times: dict[Request, float] = {}
        self._generated: dict[Request, int] = {}  # generated tokens when `times` was set

    def update(self, view: View, ahead: float) -> dict[Request, float]:
        """Sets the times of decodes that have received a token. Returns all times. ahead: seconds before the token is due."""
        for request in view.decoding:
            generated = request.num_new_tokens
            if self._generated.get(request) != generated:
                self._generated[request] = generated
                self.times[request] = view.now + (request.slo.tbt or self.tbt) - ahead
        return self.times

    def forget(self, request: Request) -> None:
        self.times.pop(request, None)
        self._generated.pop(request, None)
