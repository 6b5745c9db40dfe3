"""How many requests wait on average, and whether their number grows."""

from collections.abc import Collection
from typing import NamedTuple, Self

import numpy as np

from cbatch.request import SERVED
from cbatch.results.metrics import Entry, Floats, Served


class Waits(NamedTuple):
    """Seconds at which requests begin and stop to wait: for admission, the prompt's iterations and a decoder, [requests] each."""

    begin: Floats
    end: Floats

    @classmethod
    def of(cls, ended: Collection[Entry], served: Served) -> Self:
        """Returns the waits of all requests: until the second token, or the only one. A rejected or cancelled one that has tokens
        waits until its admission, others until they leave."""
        unserved = [request for request in ended if request.finish_reason not in SERVED]
        arrival = np.array([request.arrival_time for request in unserved])
        left = [request.admitted_at if request.num_output_tokens else request.finished_at for request in unserved]
        end = np.where(np.isnan(served.second_token), served.first_token, served.second_token)
        left_at = np.maximum(np.array(left, float), arrival)
        return cls(np.concatenate([served.arrival, arrival]), np.concatenate([end, left_at]))

    def between(self, begin: float, end: float) -> float:
        """Returns the mean number of requests that wait from the share `begin` of the time of arrivals to the share `end`; 0 if all arrive at once."""
        first, span = self.begin.min(initial=np.inf), np.ptp(self.begin) if len(self.begin) else 0.0
        if not span:
            return 0.0
        least, most = first + begin * span, first + end * span
        waited = np.clip(self.end, least, most) - np.clip(self.begin, least, most)
        return float(waited.sum() / ((end - begin) * span))

    @property
    def mean(self) -> float:
        """Returns the mean number of requests that wait between the first and the last arrival."""
        return self.between(0, 1)

    @property
    def grow(self) -> bool:
        """Returns whether the number that waits grows, after the first quarter of the time of arrivals, from one half of the rest to the other.

        The limit is a standard deviation of this growth where n Poisson arrivals meet a server that is always busy and exactly as fast:
        the queue is a random walk, and the growth's variance n/4. Gaps that vary more than those of Poisson raise it in proportion.
        """
        gaps = np.diff(np.sort(self.begin))
        if not gaps.sum():
            return False
        noise = max(1.0, gaps.std() / gaps.mean()) * np.sqrt(len(self.begin)) / 2
        return bool(self.between(0.625, 1) - self.between(0.25, 0.625) > noise)
