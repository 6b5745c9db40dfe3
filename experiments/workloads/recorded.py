"""Replays a recorded trace: its lengths, and its arrival times unless all is queued at once."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

import numpy as np

from cbatch import Request, WorkloadError
from cbatch.validation import Give, not_negative, positive
from experiments.workloads.base import Vocabulary, Workload
from experiments.workloads.readers.traces import FORMATS, read_trace
from experiments.workloads.trace import Format, ScaledFit, Trace


@dataclass(frozen=True, kw_only=True, repr=False)
class Replay(Workload, ScaledFit):
    """Base of recorded and generated traces.

    num_requests: the first N that fit; None takes all. max_new_tokens: "exact" keeps the limits of the trace's lines.
    queued: every request arrives at time 0; arrival times only set the order.
    """

    queued: bool = False

    def within(self, positions: int) -> Self:
        return self.limit_to(positions, self.max_new_tokens, refuse=True)

    def _replay(self, trace: Trace, vocabulary: Vocabulary | None) -> Sequence[Request]:
        trace = _with_ends(trace, vocabulary)
        if self.max_new_tokens != "exact":
            trace = replace(trace, fields={**trace.fields, "max_new_tokens": np.full(len(trace), None)})
        trace = self.fit(trace, self.num_requests)
        if self.queued:
            fields = {name: column for name, column in trace.fields.items() if name != "arrival_iteration"}
            trace = replace(trace, arrival_time=None, fields=fields)
        return self._build(trace, vocabulary)


def _with_ends(trace: Trace, vocabulary: Vocabulary | None) -> Trace:
    """Returns a trace whose outputs have their recorded lengths, unless real tokens of recorded prompts decide where outputs end."""
    prompts, lengths, limits = map(trace.fields.get, ("prompt", "true_new_tokens", "max_new_tokens"))
    if vocabulary is not None and prompts is not None:
        for row, largest in enumerate(map(max, prompts)):
            if largest >= vocabulary.size:
                problem = f"token id {largest} is not in the model's vocabulary"
                raise WorkloadError(f"{trace.where(row)}: {problem}; give the model of the recorded run")
    elif limits is not None:
        ends = np.array(trace.output_tokens, object)
        ends[trace.output_tokens >= limits] = None
        ends = ends if lengths is None else np.where(lengths == None, ends, lengths)  # noqa: E711 - of each row
        return replace(trace, fields={**trace.fields, "true_new_tokens": ends})
    return trace


@dataclass(frozen=True, kw_only=True, repr=False)
class TraceReplay(Replay):
    """Requests as a trace file recorded them.

    path, format, columns: as of `experiments.workloads.readers.traces.read_trace`.
    start: seconds into the trace; earlier rows are left out, and the first one kept arrives at time 0.
    speed: 2 replays twice as fast (half the time between arrivals).
    """

    path: str
    format: Format = "auto"
    columns: Annotated[Mapping[str, str] | None, Give("columns by attribute, as in {client: user_id}")] = None
    start: Annotated[float, not_negative("seconds into the trace")] = 0.0
    speed: Annotated[float, positive("1 replays in real time, 2 twice as fast")] = 1.0

    @property
    def unread(self) -> tuple[str, Collection[str]]:
        recorded = self.format == "decisions"
        modes = ["format=decisions"] * recorded + ["queued=true"] * self.queued
        return f"a trace with {' and '.join(modes)}", ["sampling", "pad_outputs"] * recorded + ["speed"] * self.queued

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        at_most = None if self.start or self.too_long == "drop" else self.num_requests
        trace = read_trace(self.path, self.format, columns=self.columns, at_most=at_most)
        if self.format == "auto" and "sampling" in trace.fields:
            replace(self, format="decisions")  # which refuses the keys that a recorded run does not read
        if trace.arrival_time is None:
            if not self.queued or self.start or self.speed != 1:
                names = ", ".join(dict.fromkeys(known.arrival for known in FORMATS.values()))
                remedy = "set workload.queued=true without start and speed, or draw them with workload=sharegpt"
                raise WorkloadError(f"{self.path}: has no column of arrival times ({names}); {remedy}")
            return self._replay(trace, vocabulary)
        if self.start > trace.arrival_time[-1]:
            problem = f"lies after the last arrival; give at most {trace.arrival_time[-1]:g} (seconds)"
            raise WorkloadError(f"{self.path}: workload.start={self.start} {problem}")
        trace = trace.select(slice(int(np.searchsorted(trace.arrival_time, self.start)), None))
        assert trace.arrival_time is not None
        return self._replay(replace(trace, arrival_time=trace.arrival_time / self.speed), vocabulary)
