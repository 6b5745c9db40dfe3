"""What a run means: throughput and latency as the field defines them, from what `record` says happened.

All times are seconds on the executor's clock. Percentiles interpolate linearly between the two nearest values (numpy's
default, Hyndman and Fan's type 7). A figure over nothing - the time between tokens where every output is one token, say -
is NaN.

    arrival     admitted        first token      token   token      last token
       |-----------|-----------------|-------------|-------|--- ... ---|
       | scheduling delay            | time between tokens (TBT), each |
       |            TTFT             |   mean of them: TPOT            |
       |                      end-to-end latency                       |

Knows nothing of who produced the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from cbatch.record import RunRecord, StepRecord
from cbatch.request import FinishReason, Request
from cbatch.validation import positive

Floats = NDArray[np.float64]
Figures = dict[str, float | dict[str, float]]

Limit = Annotated[float, positive("seconds; null sets none")]

PERCENTILES = (50, 90, 95, 99)
SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run that counts, in seconds: what happened after `start`, up to and including `end`."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def holds(self, times: Floats) -> NDArray[np.bool_]:
        return (times > self.start) & (times <= self.end)


@dataclass(frozen=True, slots=True)
class Objectives:
    """Service-level objectives in seconds; None asks nothing. A request attains them if it meets all (DistServe, OSDI 2024)."""

    ttft: Limit | None = None
    tpot: Limit | None = None
    end_to_end: Limit | None = None

    @property
    def stated(self) -> bool:
        return any(limit is not None for limit in (self.ttft, self.tpot, self.end_to_end))


@dataclass(frozen=True, eq=False)
class Served:
    """The requests that were served to their end, in the order of their ends; a column each, [requests].

    id: int64. arrival, admitted, first_token, last_token: seconds. prompt_tokens, output_tokens: int64.
    token_ids, token_times: (request id, seconds) of every token they received, by request and then by time, [tokens].
    """

    id: NDArray[np.int64]
    arrival: Floats
    admitted: Floats
    first_token: Floats
    last_token: Floats
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    token_times: Floats

    @property
    def scheduling_delay(self) -> Floats:
        """Arrival to first admission."""
        return self.admitted - self.arrival

    @property
    def ttft(self) -> Floats:
        """Time to first token: arrival until the first token is on the host, so queueing is part of it."""
        return self.first_token - self.arrival

    @property
    def tpot(self) -> Floats:
        """Time per output token: (last - first) / (tokens - 1), one value a request; NaN for a single token."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.last_token - self.first_token) / gaps

    @property
    def end_to_end(self) -> Floats:
        """Arrival to last token."""
        return self.last_token - self.arrival

    @property
    def normalized_latency(self) -> Floats:
        """End-to-end latency per output token (Orca, OSDI 2022; vLLM, SOSP 2023)."""
        return self.end_to_end / self.output_tokens

    def gaps(self) -> tuple[Floats, Floats]:
        """Time between tokens (TBT): (seconds of the gap, when its later token came), one for each but first tokens.

        Stalls show here and hide in TPOT, which averages over a request (Sarathi-Serve, OSDI 2024).
        """
        same = self.token_ids[1:] == self.token_ids[:-1]
        return np.diff(self.token_times)[same], self.token_times[1:][same]


def step_columns(steps: Sequence[StepRecord]) -> dict[str, NDArray[Any]]:
    """The numbers of all iterations, a column for each field of `StepRecord` but the note, [iterations]."""
    fields = StepRecord._fields[:-1]
    columns = list(zip(*steps, strict=True)) or [()] * len(fields)
    return {name: np.array(column) for name, column in zip(fields, columns, strict=False)}


def arrival_of(request: Request, steps: Sequence[StepRecord]) -> float:
    """When a request arrived, in seconds. One that arrives by iteration arrives when that iteration is planned."""
    arrival = request.arrival_time
    if 0 < request.arrival_iteration < len(steps):
        arrival = max(arrival, steps[request.arrival_iteration].planned_at)
    return arrival if request.admitted_at is None else min(arrival, request.admitted_at)


def served(record: RunRecord) -> Served:
    """The requests of a run that ended otherwise than by rejection."""
    requests = [request for request in record.requests if request.finish_reason is not FinishReason.REJECTED]
    id_ = np.array([request.id for request in requests], np.int64)
    token_ids, token_times = record.tokens()
    order = _order_of(token_ids)
    token_ids, token_times = token_ids[order], token_times[order]
    first, end = (np.searchsorted(token_ids, id_, side=side) for side in SIDES)
    if (end - first).sum() < len(token_ids):  # some were received by others, which were rejected later
        kept = np.isin(token_ids, id_)
        token_ids, token_times = token_ids[kept], token_times[kept]
        first, end = (np.searchsorted(token_ids, id_, side=side) for side in SIDES)
    return Served(
        id=id_,
        arrival=np.array([arrival_of(request, record.steps) for request in requests], np.float64),
        admitted=np.array([request.admitted_at for request in requests], np.float64),
        first_token=token_times[first],
        last_token=token_times[end - 1],
        prompt_tokens=np.array([request.num_prompt_tokens for request in requests], np.int64),
        output_tokens=end - first,
        token_ids=token_ids,
        token_times=token_times,
    )


def _order_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """What sorts the ids and keeps equal ones in their order; numpy sorts 16-bit numbers in linear time."""
    most = int(ids.max(initial=0))
    return np.argsort(ids.astype(np.uint16) if most < 2**16 and ids.min(initial=0) >= 0 else ids, kind="stable")


def window_of(record: RunRecord, requests: Served, warmup_requests: int = 0, drain_requests: int = 0) -> Window:
    """From the end of the first `warmup_requests` to the end of all but the last `drain_requests`, by time of their ends.

    Without a warm-up it begins where the first iteration was planned. It is empty (end = start) if nothing is left.
    """
    ends = np.sort(requests.last_token)
    start = record.steps[0].planned_at if record.steps else 0.0
    if warmup_requests:
        start = float(ends[min(warmup_requests, len(ends)) - 1]) if len(ends) else start
    num_left = len(ends) - drain_requests
    return Window(start, max(float(ends[num_left - 1]), start) if num_left > 0 else start)


def statistics(values: Floats) -> dict[str, float]:
    """Mean and percentiles; NaN values are left out."""
    values = values[~np.isnan(values)]
    names = ["mean", *(f"p{rank}" for rank in PERCENTILES)]
    if not len(values):
        return dict.fromkeys(names, float("nan"))
    return dict(zip(names, [float(values.mean()), *np.percentile(values, PERCENTILES).tolist()], strict=True))


def busy_seconds(begin: Floats, end: Floats, window: Window) -> float:
    """Seconds of the window that at least one interval covers; intervals in the order of their begins, [intervals] each."""
    begin, end = (np.clip(times, window.start, window.end) for times in (begin, end))
    covered = np.maximum.accumulate(np.concatenate([[window.start], end]))[:-1]  # before each interval
    return float(np.maximum(end - np.maximum(begin, covered), 0.0).sum())
