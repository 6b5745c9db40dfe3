"""Gathers what a summary needs from the record of a run, at once or in pieces.

When a request ends, its times become a row, and the gaps between its tokens are counted by time and length. Memory thus grows
with requests and iterations, not with tokens.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.record import Life, RunRecord, Transfer
from cbatch.request import FinishReason, Ints
from cbatch.results import metrics
from cbatch.results.metrics import Ended, Served, StepColumns, Window

Growing = dict[str, tuple[np.dtype[Any], bytearray]]
"""Columns that grow in place: joining pieces would take twice the memory."""

_row_of = attrgetter(*Ended._fields)


class Gathered:
    """The data of a summary.

    ended: requests in the order of their ends. replica_of, prefilled_on, pools, lives, transfers, lost: as in `RunRecord`. of_pool: the data of each pool.
    """

    def __init__(self, *pieces: RunRecord) -> None:
        self.ended: list[Ended] = []
        self.replica_of: Mapping[int, int] = {}
        self.prefilled_on: Mapping[int, int] | None = None
        self.pools: Sequence[str] = ()
        self.lives: Sequence[Life] = ()
        self.transfers: Sequence[Transfer] = ()
        self.lost: Sequence[Transfer] = ()
        self.of_pool: dict[str, Gathered] = {}
        self._token_ids, self._token_times = np.zeros(0, np.int64), np.zeros(0)  # of unfinished requests
        self._steps: Growing = {}
        self._served: Growing = {}
        for piece in pieces:
            self.add(piece)

    @property
    def served(self) -> Served:
        """Returns all served requests, without their tokens."""
        return Served(**_arrays(self._served))

    @property
    def prefillers(self) -> Ints:
        """Returns the replica that computed the prompt of each served request, [requests]."""
        of = {**self.replica_of, **(self.prefilled_on or {})}
        return np.array([of[id_] for id_ in self.served.id.tolist()], np.int64)

    def prompts(self, window: Window, members: NDArray[np.bool_] | None = None) -> int:
        """Returns the tokens of the served prompts whose first token came in the window. members: computed by these replicas, [replicas]; None: all."""
        served = self.served
        inside = window.holds(served.first_token)
        return int(served.prompt_tokens[inside if members is None else inside & members[self.prefillers]].sum())

    def members(self, pool: str) -> NDArray[np.bool_]:
        """Returns which replicas are of a pool, [replicas]."""
        return np.array([name == pool for name in self.pools])

    @property
    def steps(self) -> StepColumns:
        """Returns the columns of all steps that a summary reads."""
        return _arrays(self._steps)

    def warming(self, number: int) -> list[Ended]:
        """Returns the requests that fill the cache before the measured part: the first ones to arrive. number: `Facts.num_warming`."""
        return sorted(self.ended, key=attrgetter("arrival_time", "id"))[:number] if number else []

    def window(self, warmup_requests: int = 0, drain_requests: int = 0, num_warming: int = 0) -> Window:
        """Returns the window that leaves out the first `warmup_requests` and the last `drain_requests` served requests, in the order of their ends.

        Without a warm-up the window begins with the run, or when the last warming request has ended, however. Without a drain it ends with the
        last token of a served request, or, if clients have left, with the last iteration, which may have been computed for them.
        If no request remains, it is empty (end = start).
        """
        steps, requests = self.steps, self.served
        ends, warming = np.sort(requests.last_token), self.warming(num_warming)
        start = max((request.finished_at for request in warming), default=metrics.began(steps, requests))
        later = ends[ends > start] if warming else ends
        if warmup_requests and len(later):
            start = float(later[min(warmup_requests, len(later)) - 1])
        num_left = len(ends) - drain_requests
        end = float(ends[num_left - 1]) if num_left > 0 else start
        if not drain_requests and any(request.finish_reason is FinishReason.CANCELLED for request in self.ended):
            end = max(end, float(steps["received_at"].max(initial=end)))
        return Window(start, max(end, start))

    def add(self, piece: RunRecord, whole: RunRecord | None = None) -> Served:
        """Adds a record, or the next piece of it. Returns the piece's served requests, with their tokens.

        whole: the record of all pools: requests of this one may have tokens from others.
        """
        ids, times = (whole or piece).tokens()
        if len(self._token_ids):
            ids, times = np.concatenate([self._token_ids, ids]), np.concatenate([self._token_times, times])
        served = metrics.served_of(piece.requests, ids, times)
        some_left, ended = served.output_tokens.sum() < len(ids), [each.id for each in (whole or piece).requests]
        left = np.isin(ids, ended, invert=True) if some_left else slice(0)
        self._token_ids, self._token_times = ids[left], times[left]
        _add(self._served, {name: values for name, values in vars(served).items() if name != "tokens"})
        columns = metrics.step_columns(piece.steps)
        _add(self._steps, {name: columns[name] for name in metrics.SUMMARIZED})
        _add(self._steps, {"replica": np.array(piece.replicas or [0] * len(piece.steps), np.int64)})
        self.ended += map(Ended._make, map(_row_of, piece.requests))
        self.replica_of, self.pools, self.lives = piece.replica_of, piece.pools, piece.lives
        self.transfers, self.lost, self.prefilled_on = piece.transfers, piece.lost, piece.prefilled_on
        for pool in dict.fromkeys(piece.pools):
            self.of_pool.setdefault(pool, Gathered()).add(_of_pool(piece, pool), piece)
        return served


def _of_pool(piece: RunRecord, pool: str) -> RunRecord:
    """Returns what the replicas of a pool have served."""
    part, members = RunRecord(), {replica for replica, name in enumerate(piece.pools) if name == pool}
    for step, receivers, replica in zip(piece.steps, piece.receivers, piece.replicas, strict=True):
        if replica in members:
            part.add_step(step, receivers)
    part.requests = [request for request in piece.requests if piece.replica_of.get(request.id) in members]
    return part


def _add(columns: Growing, more: Mapping[str, NDArray[Any]]) -> None:
    for name, values in more.items():
        columns.setdefault(name, (values.dtype, bytearray()))[1].extend(values.tobytes())


def _arrays(columns: Growing) -> dict[str, Any]:
    return {name: np.frombuffer(content, kind) for name, (kind, content) in columns.items()}
