"""Where all requests and KV blocks of an engine are: at any moment, and above all when a run ends before its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cbatch.engine import Engine
from cbatch.request import FinishReason, Request, Status


class Accounts(NamedTuple):
    """Counts of requests and KV blocks.

    pending: not arrived. running: admitted, their last token in flight counted. served, rejected: ended.
    iterations: ended. in_flight: iterations launched that have not ended.
    free, held, retiring: KV blocks; held by requests, or coming free when the iterations in flight have ended.
    """

    pending: int
    waiting: int
    running: int
    served: int
    rejected: int
    iterations: int
    in_flight: int
    free: int
    held: int
    retiring: int

    @property
    def num_requests(self) -> int:
        return self.pending + self.waiting + self.running + self.served + self.rejected

    @property
    def num_blocks(self) -> int:
        """All blocks of the KV cache, if none was lost or given out twice."""
        return self.free + self.held + self.retiring


def accounts_of(engines: Sequence[Engine], requests: Sequence[Request]) -> Accounts:
    """Of one engine, or of all replicas together, with the requests that were submitted to them."""
    by_status = Counter(request.status for request in requests)
    states = [engine.state for engine in engines]
    rejected = sum(request.finish_reason is FinishReason.REJECTED for request in requests)
    return Accounts(
        pending=by_status[Status.PENDING],
        waiting=by_status[Status.WAITING],
        running=by_status[Status.RUNNING],
        served=by_status[Status.FINISHED] - rejected,
        rejected=rejected,
        iterations=sum(state.num_ended for state in states),
        in_flight=sum(state.iteration - state.num_ended for state in states),
        free=sum(state.pool.num_free for state in states),
        held=sum(int(state.pool.held.sum()) for state in states),
        retiring=sum(state.pool.num_retiring for state in states),
    )
