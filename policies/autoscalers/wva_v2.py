"""llm-d's workload variant autoscaler, version 2: as many replicas as hold the tokens in use and in queues.

    capacity   min(k1, k2) of a replica; of a pool the median over its ready replicas
    k1         `kv` x tokens of the KV cache
    k2         tokens in use, if at least `queue` requests wait; else the mean of the pool's latest ten such values; else
               min(B O / (I + O), S) x (I + O / 2), with B tokens and S requests in an iteration, I prompt and O output tokens on average
    demand     tokens in use + waiting requests x I
    required   max(0, demand / `up` - capacity of the replicas that are ready or start)
    spare      max(0, capacity of the ready replicas - demand / `down`)

The required capacity comes from the pool with the fewest dollars per capacity, rounded up to replicas; the spare one goes from the
dearest pool, rounded down.

Source: the code (llm-d-incubation/workload-variant-autoscaler b08b1c7, saturation_v2 and the cost-aware optimizer). Differences: I
and O are means over all requests that have ended, k1 alone counts before the first has; a router's queue does not exist here.
"""

from collections import defaultdict, deque
from math import ceil
from statistics import fmean, median

from cbatch import ConfigError
from cbatch.cluster import ClusterView, Phase, ReplicaView
from policies.autoscalers.pools import Saturation, pools_of, present_in, price_of


class WVAv2(Saturation):
    def __init__(
        self,
        kv: float = 0.80,
        queue: float = 5.0,
        up: float = 0.85,
        down: float = 0.70,
        every: float = 30.0,
        window: float = 60.0,
    ) -> None:
        """every, window: see `Saturation`; signals are the largest values in the window."""
        super().__init__(kv, queue, every, window)
        if not 0 < down <= up:
            raise ConfigError(f"autoscale: need 0 < {down=} <= {up=}")
        self.up, self.down = up, down
        self._seen: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=10))
        self._capacity: dict[str, float] = {}  # of a replica, by pool; kept while none is ready

    def wanted(self, view: ClusterView) -> dict[str, int]:
        signals, pools = self.sample(view), pools_of(view)
        self._wanted = self._wanted or dict.fromkeys(pools, view.least)
        if view.now < self._next or not signals:
            return self._wanted
        self._next = view.now + self.every
        loads = {
            index: (round(share * view[index].num_blocks) * view[index].block_size, queue)
            for index, (share, queue) in signals.items()
        }
        lengths = _lengths(view)
        for pool in pools:
            if own := [
                self._of(view[index], *load, lengths) for index, load in loads.items() if view[index].pool == pool
            ]:
                self._capacity[pool] = median(own)
        required, spare = self.balance(view, sum(used + queue * lengths[0] for used, queue in loads.values()))
        self._wanted = present_in(pools)
        if required:
            self._grow(required, pools)
        else:
            self._shrink(spare, pools, view.least)
        return self._wanted

    def balance(self, view: ClusterView, demand: float) -> tuple[float, float]:
        """Returns the required and the spare capacity in tokens."""
        supply = {
            phase: sum(self._capacity.get(part.pool, 0.0) for part in view if part.phase is phase) for phase in Phase
        }
        ready, coming = supply[Phase.READY], supply[Phase.STARTING]
        return max(0.0, demand / self.up - ready - coming), max(0.0, ready - demand / self.down)

    def _of(self, replica: ReplicaView, used: int, queue: int, lengths: tuple[float, float]) -> float:
        """Returns the capacity of a replica in tokens."""
        seen, (prompt, output) = self._seen[replica.pool], lengths
        k1 = self.kv * replica.num_blocks * replica.block_size
        if queue >= self.queue:
            seen.append(used)
            return min(k1, used)
        if seen:
            return min(k1, fmean(seen))
        if not output:
            return k1
        batch = min(replica.limits.max_tokens * output / (prompt + output), replica.limits.max_batch)
        return min(k1, batch * (prompt + output / 2))

    def _grow(self, required: float, pools: dict[str, list[ReplicaView]]) -> None:
        known = [pool for pool in pools if self._capacity.get(pool)]
        for pool in sorted(known, key=lambda name: (price_of(pools[name]) / self._capacity[name], name)):
            more = min(ceil(required / self._capacity[pool]), len(pools[pool]) - self._wanted[pool])
            self._wanted[pool] += more
            if (required := required - more * self._capacity[pool]) <= 0:
                return
        if known:
            self._wanted[pool] += ceil(required / self._capacity[pool])  # more than there are, which the run reports

    def _shrink(self, spare: float, pools: dict[str, list[ReplicaView]], least: int) -> None:
        known = [pool for pool in pools if self._capacity.get(pool)]
        for pool in sorted(known, key=lambda name: (price_of(pools[name]), name), reverse=True):
            fewer = min(int(spare / self._capacity[pool]), self._wanted[pool] - least)
            self._wanted[pool] -= fewer
            spare -= fewer * self._capacity[pool]


def _lengths(view: ClusterView) -> tuple[float, float]:
    """Returns the mean prompt and output tokens of the requests that have ended; 0 before the first."""
    number = sum(replica.num_ended for replica in view) or 1
    sums = [sum(getattr(replica, f"ended_{kind}_tokens") for replica in view) for kind in ("prompt", "output")]
    return sums[0] / number, sums[1] / number
