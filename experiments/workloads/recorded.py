"""Replays a recorded trace: its lengths, and its arrival times unless all is queued at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cbatch.errors import WorkloadError
from cbatch.request import Request
from experiments.workloads.base import Vocabulary, Workload
from experiments.workloads.checks import check_not_negative, check_positive
from experiments.workloads.fit import TooLong, fit
from experiments.workloads.readers import Format, read_trace
from experiments.workloads.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Replay(Workload):
    """What recorded and generated traces share.

    Fields:
        num_requests: the first so many that fit; None takes all.
        queued: every request is there at time 0; arrival times only set the order.
        length_scale, max_length, too_long: see `fit`.
    """

    queued: bool = False
    length_scale: float = 1.0
    max_length: int | None = None
    too_long: TooLong = "error"

    def _replay(self, trace: Trace, vocabulary: Vocabulary | None) -> list[Request]:
        trace = fit(trace, self.length_scale, self.max_length, self.too_long, self.num_requests)
        return self._build(replace(trace, arrival_time=None) if self.queued else trace, vocabulary)


@dataclass(frozen=True, kw_only=True)
class TraceReplay(Replay):
    """Requests as a trace file recorded them.

    Fields:
        path, format: see `read_trace`.
        start: seconds into the trace; rows before are left out, and the first one kept arrives at time 0.
        speed: 2 replays twice as fast (half the time between arrivals).
    """

    path: str
    format: Format = "auto"
    start: float = 0.0
    speed: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative("start", self.start, "seconds into the trace")
        check_positive("speed", self.speed, "1 replays in real time, 2 twice as fast")

    def requests(self, vocabulary: Vocabulary | None) -> list[Request]:
        trace = read_trace(self.path, self.format)
        if trace.arrival_time is None:
            self._check_untimed()
            return self._replay(trace, vocabulary)
        if self.start > trace.arrival_time[-1]:
            raise WorkloadError(
                f"{self.path}: workload.start={self.start} lies after the last arrival: "
                f"give at most {trace.arrival_time[-1]:g} (seconds)"
            )
        trace = trace.select(slice(int(np.searchsorted(trace.arrival_time, self.start)), None))
        assert trace.arrival_time is not None
        return self._replay(replace(trace, arrival_time=trace.arrival_time / self.speed), vocabulary)

    def _check_untimed(self) -> None:
        if not self.queued or self.start or self.speed != 1:
            raise WorkloadError(
                f"{self.path}: has no arrival times: set workload.queued=true without start and speed, "
                "or use workload=sharegpt, which draws them"
            )
