"""As many replicas as the arrivals need: their rate over the rate that one replica sustains at its objectives, rounded up.

`python -m experiments.capacity` measures that rate for one replica, and writes it to capacity.json. Replicas are taken from the pool
with the fewest dollars per request first; ties go by name. Enough of each role: a request needs a prefiller and a decoder.
"""

import json
from collections import deque
from collections.abc import Mapping
from math import ceil
from pathlib import Path

from cbatch import ConfigError
from cbatch.cluster import ClusterView, Role
from policies.autoscalers.pools import pools_of, price_of


class Arrivals:
    def __init__(self, capacity: float | str | Mapping[str, float | str], window: float = 60.0) -> None:
        """
        Args:
            capacity: requests per second of one replica of any pool, or the path of a capacity.json; or either for each pool by its name.
            window: seconds over which arrivals are counted.
        """
        self.capacity, self.window = capacity, window
        self._own = isinstance(capacity, Mapping)
        given = dict(capacity) if isinstance(capacity, Mapping) else {"": capacity}
        self._rates = {pool: _measured(rate) if isinstance(rate, str) else rate for pool, rate in given.items()}
        if not (self._rates and all(rate > 0 for rate in self._rates.values()) and window > 0):
            raise ConfigError(f"autoscale: need {capacity=} and {window=} above 0")
        self._counts: deque[tuple[float, int]] = deque()  # requests that had arrived, at each call

    def wanted(self, view: ClusterView) -> dict[str, int]:
        pools, arrivals, wanted = pools_of(view), self._arrivals(view), dict[str, int]()
        if self._own and self._rates.keys() != pools.keys():
            known, given = (", ".join(sorted(names)) for names in (pools, self._rates))
            raise ConfigError(
                f"autoscale.capacity names the pools {given}, and backend.pools {known}; give each its own"
            )
        rates = self._rates if self._own else dict.fromkeys(pools, self._rates[""])
        for role in Role:
            left, of_role = arrivals, [pool for pool in pools if pools[pool][0].role is role]
            for pool in sorted(of_role, key=lambda name: (price_of(pools[name]) / rates[name], name)):
                wanted[pool] = min(max(_ceil(left / rates[pool]), 0), len(pools[pool]))
                left -= max(wanted[pool], view.least) * rates[pool]
            if of_role:
                wanted[pool] += max(_ceil(left / rates[pool]), 0)  # more than there are, which the run reports
        return wanted

    def _arrivals(self, view: ClusterView) -> float:
        """Returns the requests per second that have arrived in the window."""
        counts = self._counts
        counts.append((view.now, view.num_arrived))
        while len(counts) > 1 and counts[1][0] <= view.now - self.window:
            counts.popleft()
        seconds = view.now - counts[0][0]
        return (view.num_arrived - counts[0][1]) / seconds if seconds else 0.0


def _ceil(replicas: float) -> int:
    """Rounds up, but for rounding errors: 1.1 / 0.1 are 11."""
    return ceil(round(replicas, 9))


def _measured(path: str) -> float:
    try:
        return float(json.loads(Path(path).read_text())["capacity"]["requests_per_second"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        missing = isinstance(error, FileNotFoundError)
        problem = "no such file" if missing else f"has no capacity ({type(error).__name__}: {error})"
        problem = f"autoscale.capacity={path}: {problem}"
        raise ConfigError(
            f"{problem}; give requests per second, or the capacity.json of experiments.capacity"
        ) from error
