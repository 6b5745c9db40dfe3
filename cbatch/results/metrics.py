"""Computes throughput and latency, as the field defines them, from the record of a run.

All times are seconds on the executor's clock. Percentiles interpolate linearly between the two nearest values (numpy's
default, Hyndman and Fan's type 7). A metric without values is NaN, such as the gaps of a request with one token.

docs/metrics.md defines the metrics, with a picture. This module does not know which executor produced the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.record import RunRecord, StepRecord
from cbatch.request import SERVED, FinishReason, Request
from cbatch.request_spec import SLO

Floats = NDArray[np.float64]
Figures = dict[str, float | dict[str, float]]
StepColumns = Mapping[str, NDArray[Any]]  # fields of `StepRecord` by name, [iterations] each

SUMMARIZED = (
    *("planned_at", "launched_at", "received_at", "done_at", "started", "ended", "num_requests"),
    *("num_prefill_tokens", "num_decode_tokens", "num_padding_tokens", "kv_blocks_used"),
    *("num_sampled", "num_scores", "num_kv_reads", "num_running", "num_waiting"),
    *("num_drafted", "num_drafts", "num_accepted", "most_drafts"),
)
"""Fields of `StepRecord` that a summary reads."""

PERCENTILES = (50, 90, 95, 99)


class Ended(NamedTuple):
    """The attributes of an ended `Request` that figures need in addition to its times."""

    id: int
    client: str | None
    session: str | None
    turn: int | None
    last: bool | None
    pause: float | None
    texts: tuple[tuple[int, int], ...]
    tier: str | None
    slo: SLO
    arrival_time: float
    finished_at: float
    finish_reason: FinishReason
    num_preemptions: int
    num_output_tokens: int
    num_lost_tokens: int
    num_recomputed_tokens: int
    num_recomputed_after_moves: int
    num_recomputed_after_lost_leases: int
    is_cut: bool
    num_prompt_tokens: int
    admitted_at: float | None
    num_cached_tokens: int
    num_host_tokens: int
    num_cached_again: int


Entry = Request | Ended


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a run, in seconds: after `start`, up to and including `end`."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def holds(self, times: Floats) -> NDArray[np.bool_]:
        return (times > self.start) & (times <= self.end)


@dataclass(frozen=True, eq=False)
class Served:
    """The requests that received their whole output, in the order of their ends, as columns [requests].

    id: int64. arrival, admitted, first_token, second_token (NaN without), last_token: seconds. prompt_tokens, output_tokens: int64.
    longest_gap: the longest time between two tokens (MTPOT, Past-Future, ASPLOS 2025); NaN for a single token.
    gap_times, gap_seconds, gap_counts: ends of gaps between tokens (TBT), lengths of the gaps, and the numbers of gaps with this
        end and length. First tokens end none. Stalls are visible in TBT but averaged away in TPOT (Sarathi-Serve, OSDI 2024). See `share_gaps`.
    tokens: request id and time of every token, sorted by request and time, [tokens] each; None if they are not kept.
    """

    id: NDArray[np.int64]
    arrival: Floats
    admitted: Floats
    first_token: Floats
    last_token: Floats
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    longest_gap: Floats
    gap_times: Floats
    gap_seconds: Floats
    gap_counts: NDArray[np.int32]
    tokens: tuple[NDArray[np.int64], Floats] | None = None
    second_token: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def scheduling_delay(self) -> Floats:
        """Returns the time from arrival to first admission."""
        return self.admitted - self.arrival

    @property
    def ttft(self) -> Floats:
        """Returns the time to first token: from arrival until the first token is on the host, including queueing."""
        return self.first_token - self.arrival

    @property
    def tpot(self) -> Floats:
        """Returns the time per output token of each request: (last - first) / (tokens - 1); NaN for a single token."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.last_token - self.first_token) / gaps

    @property
    def end_to_end(self) -> Floats:
        """Returns the time from arrival to last token."""
        return self.last_token - self.arrival

    @property
    def normalized_latency(self) -> Floats:
        """Returns the end-to-end latency per output token (Orca, OSDI 2022; vLLM, SOSP 2023)."""
        return self.end_to_end / self.output_tokens

    def gap_statistics(self, window: Window) -> dict[str, float]:
        """Returns mean and percentiles of the gaps that end in the window."""
        inside = window.holds(self.gap_times)
        return counted_statistics(self.gap_seconds[inside], self.gap_counts[inside])

    def num_tokens(self, window: Window) -> int:
        """Returns the number of tokens that arrive in the window: first tokens, and those that end a gap."""
        return int(window.holds(self.first_token).sum() + self.gap_counts[window.holds(self.gap_times)].sum())


def mean(values: Any) -> float:
    """Returns the mean; NaN without values."""
    return float(values.mean()) if len(values) else float("nan")


def step_columns(steps: Sequence[StepRecord]) -> dict[str, NDArray[Any]]:
    """Returns every field of `StepRecord` except the note, as columns [iterations], int32, int64 or float64."""
    types = {int: np.int32, float: np.float64}
    kinds = {**StepRecord.__annotations__, "num_scores": np.int64}
    columns = dict(zip(kinds, zip(*steps, strict=True) if steps else [()] * len(kinds), strict=True))
    numbers = {name: types.get(kind, kind) for name, kind in kinds.items() if kind is not str}
    return {name: np.fromiter(columns[name], kind, len(steps)) for name, kind in numbers.items()}


def collect_served(record: RunRecord) -> Served:
    """Returns the requests of a run that received their whole output."""
    return served_of(record.requests, *record.tokens())


def served_of(ended: Sequence[Request], token_ids: NDArray[np.int64], token_times: Floats) -> Served:
    """Returns the requests that received their whole output. token_ids, token_times: all tokens, as in `RunRecord.tokens`."""
    requests = [request for request in ended if request.finish_reason in SERVED]
    id_ = np.array([request.id for request in requests], np.int64)
    least = token_ids.min() if len(token_ids) else 0
    few = int(token_ids.max(initial=0)) - least < 2**16  # numpy sorts 16-bit numbers in linear time
    order = np.argsort((token_ids - least).astype(np.uint16) if few else token_ids, kind="stable")
    ids = token_ids[order]
    first, end = np.searchsorted(ids, id_), np.searchsorted(ids, id_, "right")
    if (end - first).sum() < len(ids):  # later rejected or cancelled requests also have tokens
        order = order[np.isin(ids, id_)]
        ids = token_ids[order]
        first, end = np.searchsorted(ids, id_), np.searchsorted(ids, id_, "right")
    times = token_times[order]
    gaps = np.diff(times, prepend=np.nan)
    gaps[first] = np.nan
    longest, place = np.full(len(id_), np.nan), np.argsort(first)
    if len(place):
        longest[place] = np.fmax.reduceat(gaps, first[place])
    seconds = np.full(len(token_ids), np.nan)
    seconds[order] = share_gaps(gaps)  # sorted by time: equal gaps are neighbours
    changes = (token_times[1:] != token_times[:-1]) | (seconds[1:] != seconds[:-1])
    unequal = np.flatnonzero(np.append(True, changes)[: len(seconds)])
    counts, ends_gap = np.diff(unequal, append=len(seconds)), ~np.isnan(seconds[unequal])
    unequal = unequal[ends_gap]
    return Served(
        id=id_,
        arrival=np.array([request.arrival_time for request in requests], np.float64),
        admitted=np.array([request.admitted_at for request in requests], np.float64),
        first_token=times[first],
        last_token=times[end - 1],
        prompt_tokens=np.array([request.num_prompt_tokens for request in requests], np.int64),
        output_tokens=end - first,
        longest_gap=longest,
        gap_times=token_times[unequal],
        gap_seconds=seconds[unequal],
        gap_counts=counts[ends_gap].astype(np.int32),
        tokens=(ids, times),
        second_token=np.where(end - first > 1, times[np.minimum(first + 1, end - 1)], np.nan),
    )


def share_gaps(gaps: Floats) -> Floats:
    """Divides the gap before tokens that arrive together, accepted drafts and the token after them, equally among these tokens.

    The mean thus stays the time per token, and a percentile is a pace at which tokens arrive (as in SGLang's `bench_serving`).

    gaps: seconds before each token, sorted by request and time; NaN before a request's first token.
    """
    if not (gaps == 0).any():
        return gaps
    begins = np.flatnonzero((gaps != 0) | (np.append(True, np.isnan(gaps[:-1]))))
    sizes = np.diff(begins, append=len(gaps))
    return np.repeat(gaps[begins] / sizes, sizes)


def began(steps: StepColumns, requests: Served) -> float:
    """Returns when a run begins: at its first iteration's plan, or at an earlier arrival that the policy let wait."""
    planned = steps["planned_at"]
    return float(min(planned.min(), requests.arrival.min(initial=np.inf))) if len(planned) else 0.0


def statistics(values: Floats) -> dict[str, float]:
    """Returns mean and percentiles, ignoring NaN."""
    values = values[~np.isnan(values)]
    names = ["mean", *(f"p{rank}" for rank in PERCENTILES)]
    if not len(values):
        return dict.fromkeys(names, float("nan"))
    return dict(zip(names, [float(values.mean()), *np.percentile(values, PERCENTILES).tolist()], strict=True))


def counted_statistics(values: Floats, counts: NDArray[Any]) -> dict[str, float]:
    """Returns `statistics` of values that occur `counts` times. Percentiles are equal; the mean may differ in the last digits."""
    if not len(values):
        return statistics(values)
    order = np.argsort(values)
    values, last = values[order], np.cumsum(counts[order])
    place = (last[-1] - 1) * np.true_divide(PERCENTILES, 100)
    below, above = (values[np.searchsorted(last, whole, "right")] for whole in (np.floor(place), np.ceil(place)))
    share, step = place % 1, above - below
    percentiles = np.where(share < 0.5, below + step * share, above - step * (1 - share))  # as numpy interpolates
    average = float(values @ counts[order]) / int(last[-1])
    return dict(zip(statistics(values[:0]), [average, *percentiles.tolist()], strict=True))


def busy_seconds(begin: Floats, end: Floats, window: Window) -> float:
    """Returns the seconds of the window that at least one interval covers. begin, end: [intervals], in any order."""
    order = np.argsort(begin, kind="stable")
    begin, end = (np.clip(times[order], window.start, window.end) for times in (begin, end))
    covered = np.maximum.accumulate(np.concatenate([[window.start], end]))[:-1]  # before each interval
    return float(np.maximum(end - np.maximum(begin, covered), 0.0).sum())
