"""What autoscalers read of the pools of a cluster."""

from collections import deque
from collections.abc import Sequence

from cbatch import ConfigError
from cbatch.cluster import ClusterView, Phase, ReplicaView, Role

DEFAULT_PRICE = 10.0
"""US dollars per hour of a replica without a price, the default cost of a variant in WVA."""


def pools_of(view: ClusterView) -> dict[str, list[ReplicaView]]:
    """Returns the replicas of each pool by its name, in whatever phase."""
    pools: dict[str, list[ReplicaView]] = {}
    for replica in view:
        pools.setdefault(replica.pool, []).append(replica)
    return pools


def count(replicas: Sequence[ReplicaView], *phases: Phase) -> int:
    """Returns the number of replicas in these phases."""
    return sum(replica.phase in phases for replica in replicas)


def price_of(replicas: Sequence[ReplicaView]) -> float:
    """Returns the dollars per hour of one replica of a pool."""
    return DEFAULT_PRICE if replicas[0].price is None else replicas[0].price


class Peaks:
    """The largest share of KV blocks in use and the longest queue of each replica in a window, as sampled at each call."""

    def __init__(self, window: float) -> None:
        """window: seconds; 0: the present values."""
        self._window = window
        self._samples: dict[int, deque[tuple[float, float, int]]] = {}

    def sample(self, view: ClusterView) -> dict[int, tuple[float, int]]:
        """Returns the KV share and the waiting requests of each ready replica, by its index."""
        for index, replica in enumerate(view):
            if replica.phase is not Phase.READY:
                self._samples.pop(index, None)
                continue
            samples = self._samples.setdefault(index, deque())
            samples.append((view.now, replica.kv_use, replica.num_waiting))
            while samples[0][0] < view.now - self._window:
                samples.popleft()
        return {
            index: (max(share for _, share, _ in samples), max(waiting for *_, waiting in samples))
            for index, samples in self._samples.items()
        }


class Saturation:
    """What both versions of llm-d's workload variant autoscaler share: their limits of a saturated replica, and when they decide."""

    def __init__(self, kv: float, queue: float, every: float, window: float) -> None:
        """every, window: seconds between decisions, and of the signals."""
        if min(kv, queue, every) <= 0 or window < 0:
            raise ConfigError(f"autoscale: need {kv=}, {queue=}, {every=} above 0 and {window=} not below")
        self.kv, self.queue, self.every = kv, queue, every
        self._peaks, self._next, self._wanted = Peaks(window), every, dict[str, int]()

    def sample(self, view: ClusterView) -> dict[int, tuple[float, int]]:
        """See `Peaks`. Raises ConfigError for roles: a replica more of one does not relieve the other."""
        if any(replica.role is not Role.BOTH for replica in view):
            problem = f"{type(self).__name__} does not tell replicas that prefill from those that decode"
            raise ConfigError(f"autoscale: {problem}; give arrivals(capacity=...), fixed(...) or one of yours")
        return self._peaks.sample(view)
