"""Merges the records of replicas to one, at once or in pieces, and their executors."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import repeat
from math import inf
from operator import attrgetter, itemgetter
from typing import Any

from cbatch.record import RunRecord, StepRecord
from cbatch.request import Ints, Request


class Merger:
    """Renumbers steps in the order in which tokens were received, and orders requests by their ends.

    Times of copies and stages are left out: they are a replica's own.
    """

    def __init__(self, replica_of: dict[int, int], pools: Sequence[str]) -> None:
        """See `RunRecord`."""
        self._places, self._num_steps = (replica_of, pools if len({*pools}) > 1 else ()), 0
        self._steps: list[tuple[float, int, StepRecord, Ints]] = []  # with the time of receipt and the replica
        self._requests: list[Request] = []

    def merge(self, records: Iterable[RunRecord], before: float = inf) -> RunRecord:
        """Returns what has ended before a time, of these records and of earlier ones. Keeps the rest for the next call.

        records: of each replica, what has been added since the last call.
        """
        steps, requests, whole = self._steps, self._requests, RunRecord()
        for replica, record in enumerate(records):
            times, numbers = map(attrgetter("received_at"), record.steps), repeat(replica, len(record.steps))
            steps += zip(times, numbers, record.steps, record.receivers, strict=True)
            requests += record.requests
        steps.sort()  # of one replica by iteration: equal times are told apart before receivers are compared
        requests.sort(key=lambda request: (_ended_at(request), request.id))
        num_steps = bisect_left(steps, before, key=itemgetter(0))
        for number, (_, replica, step, receivers) in enumerate(steps[:num_steps], self._num_steps):
            whole.steps.append(StepRecord._make((number, *step[1:])))
            whole.receivers.append(receivers)
            whole.replicas.append(replica)
        num_requests = bisect_left(requests, before, key=_ended_at)
        whole.requests, self._num_steps = requests[:num_requests], self._num_steps + num_steps
        del steps[:num_steps], requests[:num_requests]
        whole.replica_of, whole.pools = self._places
        return whole


def _ended_at(request: Request) -> float:
    assert request.finished_at is not None
    return request.finished_at


class Executors:
    """The executors of all replicas, with the methods of an executor that are called after a run."""

    def __init__(self, executors: Sequence[Any]) -> None:
        self.executors = executors

    def now(self) -> float:
        return float(max(executor.now() for executor in self.executors))

    def close(self) -> None:
        for executor in self.executors:
            executor.close()
