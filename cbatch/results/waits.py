"""How many requests wait on average, and whether their number grows."""

from collections.abc import Collection
from typing import NamedTuple, Self

import numpy as np

from cbatch.request import SERVED
from cbatch.results.metrics import Entry, Floats, Served


class Waits(NamedTuple):
    """Seconds at which requests arrived, were admitted and got their first token, [requests] each; for requests that never got so far, their end."""

    arrival: Floats
    admitted: Floats
    first_token: Floats

    @classmethod
    def of(cls, ended: Collection[Entry], served: Served) -> Self:
        """Returns the waits of all requests. A rejected or cancelled one with tokens counts as if it had the first at its admission."""
        unserved = [request for request in ended if request.finish_reason not in SERVED]
        arrival = np.array([request.arrival_time for request in unserved])
        left = np.maximum([request.finished_at or 0.0 for request in unserved], arrival)
        admitted = np.array([np.nan if (at := request.admitted_at) is None else at for request in unserved])
        admitted = np.where(np.isnan(admitted), left, admitted)
        first = np.where([request.num_output_tokens > 0 for request in unserved], admitted, left)
        pairs = (served.arrival, arrival), (served.admitted, admitted), (served.first_token, first)
        return cls(*map(np.concatenate, pairs))

    @property
    def mean(self) -> float:
        """Returns the mean number of requests waiting for first admission, between first and last arrival; 0 if they coincide."""
        span = np.ptp(self.arrival) if len(self.arrival) else 0.0
        waited = np.minimum(self.admitted, self.arrival.max(initial=0.0)) - self.arrival
        return float(waited.sum() / span) if span > 0 else 0.0

    @property
    def grow(self) -> bool:
        """Returns whether more requests wait for their first token at the last arrival than at the median one, by more than noise.

        The limit is twice the standard deviation of the number of arrivals in between: sqrt(n), or more if gaps vary more than those of Poisson.
        """
        arrival, gaps = np.sort(self.arrival), np.diff(np.sort(self.arrival))
        if not gaps.sum():
            return False
        middle, last = ((arrival <= at).sum() - (self.first_token <= at).sum() for at in arrival[[len(gaps) // 2, -1]])
        noise = max(1.0, gaps.std() / gaps.mean()) * np.sqrt(len(arrival) / 2)
        return bool(last - middle > 2 * noise)
