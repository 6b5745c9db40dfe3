"""As many replicas as the arrivals need: their rate over the rate that one replica sustains at its objectives, rounded up.

`python -m experiments.capacity` measures that rate for one replica, and writes it to capacity.json. Replicas are taken from the pool
with the fewest dollars per hour first; ties go by name. As many of each role: a request needs a prefiller and a decoder.
"""

import json
from collections import deque
from math import ceil
from pathlib import Path

from cbatch import ConfigError
from cbatch.cluster import ClusterView, Role
from policies.autoscalers.pools import pools_of, price_of


class Arrivals:
    def __init__(self, capacity: float | str, window: float = 60.0) -> None:
        """
        Args:
            capacity: requests per second of one replica of any pool, or the path of a capacity.json.
            window: seconds over which arrivals are counted.
        """
        self.capacity, self.window = capacity, window
        self._rate = capacity if not isinstance(capacity, str) else _measured(capacity)
        if not (self._rate > 0 and window > 0):
            raise ConfigError(f"autoscale: need {capacity=} and {window=} above 0")
        self._counts: deque[tuple[float, int]] = deque()  # requests that had arrived, at each call

    def wanted(self, view: ClusterView) -> dict[str, int]:
        needed, wanted = ceil(self._arrivals(view) / self._rate), {}
        pools = pools_of(view)
        for role in Role:
            left, of_role = needed, [pool for pool in pools if pools[pool][0].role is role]
            for pool in sorted(of_role, key=lambda name: (price_of(pools[name]), name)):
                wanted[pool] = min(left, len(pools[pool]))
                left -= max(wanted[pool], view.least)
        return wanted

    def _arrivals(self, view: ClusterView) -> float:
        """Returns the requests per second that have arrived in the window."""
        counts = self._counts
        counts.append((view.now, view.num_arrived))
        while len(counts) > 1 and counts[1][0] <= view.now - self.window:
            counts.popleft()
        seconds = view.now - counts[0][0]
        return (view.num_arrived - counts[0][1]) / seconds if seconds else 0.0


def _measured(path: str) -> float:
    try:
        return float(json.loads(Path(path).read_text())["capacity"]["requests_per_second"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"autoscale.capacity={path}: has no capacity ({type(error).__name__}: {error})"
        raise ConfigError(
            f"{problem}; give requests per second, or the capacity.json of experiments.capacity"
        ) from error
