"""Gathers the data of a summary from a record that arrives in pieces.

When a request ends, its times become a row, its gaps between tokens are counted by time and length, and its tokens are dropped.
Memory thus grows with requests and iterations, not with tokens.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.record import RunRecord
from cbatch.results import metrics
from cbatch.results.metrics import Ended, Floats, Served, StepColumns, Window, statistics

Columns = dict[str, NDArray[Any]]
Growing = dict[str, tuple[np.dtype[Any], bytearray]]
"""Columns that grow in place: joining pieces would take twice the memory."""

_row_of = attrgetter(*Ended._fields)


@dataclass(frozen=True, eq=False)
class CountedServed(Served):
    """Requests without their tokens.

    longest: as `longest_gap`. gap_times, gap_seconds, gap_counts: ends of gaps between tokens, lengths of the gaps, and the
        numbers of gaps with this end and length.
    """

    longest: Floats
    gap_times: Floats
    gap_seconds: Floats
    gap_counts: NDArray[np.int32]

    def gap_statistics(self, window: Window) -> dict[str, float]:
        inside = window.holds(self.gap_times)
        return counted_statistics(self.gap_seconds[inside], self.gap_counts[inside])

    def num_tokens(self, window: Window) -> int:
        """Returns the number of first tokens plus the number of gaps: every other token ends a gap."""
        return int(window.holds(self.first_token).sum() + self.gap_counts[window.holds(self.gap_times)].sum())

    @cached_property
    def longest_gap(self) -> Floats:
        return self.longest


class StreamedRun:
    """Gathers the pieces of a record. Requests must arrive by time, not by iteration. ended: ended requests in the order of their ends."""

    def __init__(self) -> None:
        self.ended: list[Ended] = []
        self._token_ids, self._token_times = np.zeros(0, np.int64), np.zeros(0)  # of unfinished requests
        self._steps: Growing = {}
        self._served: Growing = {}

    def take(self, piece: RunRecord) -> Served:
        """Adds a piece. Returns the piece's served requests, with all their tokens."""
        ids, times = piece.tokens()
        ids, times = np.concatenate([self._token_ids, ids]), np.concatenate([self._token_times, times])
        have_ended = np.isin(ids, [request.id for request in piece.requests])
        self._token_ids, self._token_times = ids[~have_ended], times[~have_ended]
        served = metrics.served_of(piece.requests, ids[have_ended], times[have_ended])
        seconds, ends = served.gaps()
        gaps, counts = np.unique(ends + 1j * seconds, return_counts=True)  # (end, length) pairs, sorted and counted
        columns_of_requests = {
            field.name: getattr(served, field.name) for field in fields(Served) if not field.name.startswith("token_")
        }
        counted = {"gap_times": gaps.real, "gap_seconds": gaps.imag, "gap_counts": counts.astype(np.int32)}
        _add(self._served, {**columns_of_requests, **counted, "longest": served.longest_gap})
        columns = metrics.step_columns(piece.steps)
        steps = {name: columns[name] for name in metrics.SUMMARIZED}
        narrow = {name: values.astype(np.int32) for name, values in steps.items() if values.dtype == np.int64}
        _add(self._steps, {**steps, **narrow})
        self.ended += map(Ended._make, map(_row_of, piece.requests))
        return served

    def served(self) -> CountedServed:
        """Returns all served requests."""
        return CountedServed(**_arrays(self._served), token_ids=np.zeros(0, np.int64), token_times=np.zeros(0))

    def steps(self) -> StepColumns:
        """Returns the columns of all steps that a summary reads."""
        return _arrays(self._steps)


def _add(columns: Growing, more: Columns) -> None:
    for name, values in more.items():
        columns.setdefault(name, (values.dtype, bytearray()))[1].extend(values.tobytes())


def _arrays(columns: Growing) -> Columns:
    return {name: np.frombuffer(content, kind) for name, (kind, content) in columns.items()}


def counted_statistics(values: Floats, counts: NDArray[Any]) -> dict[str, float]:
    """Returns `statistics` of values that occur `counts` times. Percentiles are equal; the mean may differ in the last digits."""
    if not len(values):
        return statistics(values)
    order = np.argsort(values)
    values, last = values[order], np.cumsum(counts[order])
    place = (last[-1] - 1) * np.true_divide(metrics.PERCENTILES, 100)
    below, above = (values[np.searchsorted(last, whole, "right")] for whole in (np.floor(place), np.ceil(place)))
    share, step = place % 1, above - below
    percentiles = np.where(share < 0.5, below + step * share, above - step * (1 - share))  # as numpy interpolates
    mean = float(values @ counts[order]) / int(last[-1])
    return dict(zip(statistics(values[:0]), [mean, *percentiles.tolist()], strict=True))
