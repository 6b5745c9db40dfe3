"""Where requests and KV blocks are, at any moment of a run and above all after a crash: none is lost."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cbatch import Engine, FinishReason, Request, Status


class Inventory(NamedTuple):
    """Number of requests, iterations and KV blocks in each state; the sums are conserved.

    pending: requests not arrived yet. running: admitted and not finished on the host. served, rejected, cancelled: ended.
    iterations: ended. in_flight: iterations launched and not ended.
    free, held, retiring: KV blocks; held by requests, or released when the iterations in flight end.
    """

    pending: int
    waiting: int
    running: int
    served: int
    rejected: int
    cancelled: int
    iterations: int
    in_flight: int
    free: int
    held: int
    retiring: int

    @property
    def num_requests(self) -> int:
        return self.pending + self.waiting + self.running + self.served + self.rejected + self.cancelled

    @property
    def num_blocks(self) -> int:
        """Equals the size of the KV cache unless a block was lost or given out twice."""
        return self.free + self.held + self.retiring


def take_inventory(engines: Sequence[Engine], requests: Sequence[Request]) -> Inventory:
    """Counts the requests submitted to one engine, or to all replicas together, and the engines' KV blocks."""
    by_status, by_reason = Counter(each.status for each in requests), Counter(each.finish_reason for each in requests)
    states = [engine.state for engine in engines]
    return Inventory(
        pending=by_status[Status.PENDING],
        waiting=by_status[Status.WAITING],
        running=by_status[Status.RUNNING],
        served=by_reason[FinishReason.LENGTH] + by_reason[FinishReason.STOP],
        rejected=by_reason[FinishReason.REJECTED],
        cancelled=by_reason[FinishReason.CANCELLED],
        iterations=sum(state.num_ended for state in states),
        in_flight=sum(state.iteration - state.num_ended for state in states),
        free=sum(state.pool.num_free for state in states),
        held=sum(int(state.pool.held.sum()) for state in states),
        retiring=sum(state.pool.num_retiring for state in states),
    )
