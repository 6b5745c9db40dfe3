"""What autoscalers read of the pools of a cluster."""

from collections import deque
from collections.abc import Mapping, Sequence

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


def present_in(pools: Mapping[str, Sequence[ReplicaView]]) -> dict[str, int]:
    """Returns the number of replicas of each pool that are ready or start."""
    return {pool: sum(each.phase in (Phase.STARTING, Phase.READY) for each in pools[pool]) for pool in pools}


def price_of(replicas: Sequence[ReplicaView]) -> float:
    """Returns the dollars per hour of one replica of a pool."""
    return DEFAULT_PRICE if replicas[0].price is None else replicas[0].price


class Saturation:
    """What both versions of llm-d's workload variant autoscaler share: their limits of a saturated replica, when they decide, and signals.

    Signals are the largest share of KV blocks in use and the longest queue of a replica in a window, as sampled at each call.
    """

    def __init__(self, kv: float, queue: float, every: float, window: float) -> None:
        """every, window: seconds between decisions, and of the signals; a window of 0: the present values."""
        if min(kv, queue, every) <= 0 or window < 0:
            raise ConfigError(f"autoscale: need {kv=}, {queue=}, {every=} above 0 and {window=} not below")
        self.kv, self.queue, self.every, self.window = kv, queue, every, window
        self._next, self._wanted = every, dict[str, int]()
        self._samples: dict[int, deque[tuple[float, float, int]]] = {}

    def sample(self, view: ClusterView) -> dict[int, tuple[float, int]]:
        """Returns the KV share and the waiting requests of each ready replica, by its index.

        Raises ConfigError for roles: a replica more of one does not relieve the other.
        """
        if any(replica.role is not Role.BOTH for replica in view):
            problem = f"{type(self).__name__} does not tell replicas that prefill from those that decode"
            raise ConfigError(f"autoscale: {problem}; give arrivals(capacity=...), fixed(...) or one of yours")
        for index, replica in enumerate(view):
            if replica.phase is not Phase.READY:
                self._samples.pop(index, None)
                continue
            samples = self._samples.setdefault(index, deque())
            samples.append((view.now, replica.kv_use, replica.num_waiting))
            while samples[0][0] < view.now - self.window:
                samples.popleft()
        columns = {index: [*zip(*samples, strict=True)] for index, samples in self._samples.items()}
        return {index: (max(shares), max(waiting)) for index, (_, shares, waiting) in columns.items()}
