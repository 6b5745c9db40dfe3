"""llm-d's workload variant autoscaler, version 1: one replica more or fewer by the spare KV cache and queue of unsaturated replicas.

A replica is saturated with a KV share of at least `kv` or `queue` waiting requests. Spare is the others' mean distance to these
limits; without others it is 0. Below either trigger the cheapest pool gets a replica more. If the spare would stay at the triggers
with one unsaturated replica fewer, at least two being there, the dearest pool gets one fewer. Ties go by the pool's name. Nothing is
decided while a replica starts, or the numbers are not those that were wanted. Signals are the largest values of the last minute.

Source: the code (llm-d-incubation/workload-variant-autoscaler b08b1c7, internal/saturation). The documentation's example, replicas at
(0.65, 1) and (0.75, 2), says up; the code holds, as floats give a mean spare of 0.10000000000000003.
Difference: a pool that has all its replicas, or the fewest, is passed over.
"""

from statistics import fmean

from cbatch import ConfigError
from cbatch.cluster import ClusterView
from policies.autoscalers.pools import Saturation, pools_of, present_in, price_of


class WVAv1(Saturation):
    def __init__(
        self,
        kv: float = 0.80,
        queue: float = 5.0,
        spare_kv: float = 0.10,
        spare_queue: float = 3.0,
        every: float = 30.0,
        window: float = 60.0,
    ) -> None:
        """every, window: see `Saturation`."""
        super().__init__(kv, queue, every, window)
        if min(spare_kv, spare_queue) < 0:
            raise ConfigError(f"autoscale: need {spare_kv=} and {spare_queue=} not below 0")
        self.spare_kv, self.spare_queue = spare_kv, spare_queue

    def wanted(self, view: ClusterView) -> dict[str, int]:
        signals, pools = self.sample(view), pools_of(view)
        present = present_in(pools)
        self._wanted = self._wanted or dict.fromkeys(pools, view.least)
        if view.now < self._next or present != self._wanted or len(signals) != sum(present.values()):
            return self._wanted
        self._next = view.now + self.every
        by_price = sorted(pools, key=lambda pool: (price_of(pools[pool]), pool))
        change = self.decide([*signals.values()])
        able = [pool for pool in by_price if view.least <= present[pool] + change <= len(pools[pool])]
        if change and able:
            pool = able[0 if change > 0 else -1]
            self._wanted = {**present, pool: present[pool] + change}
        elif change > 0:
            return {**present, by_price[0]: present[by_price[0]] + 1}  # more than there are, which the run reports
        return self._wanted

    def decide(self, signals: list[tuple[float, int]]) -> int:
        """Returns 1, 0 or -1 for the KV shares and queues of the ready replicas."""
        free = [(kv, queue) for kv, queue in signals if kv < self.kv and queue < self.queue]
        if not free:
            return 1
        spare = fmean(self.kv - kv for kv, _ in free), fmean(self.queue - queue for _, queue in free)
        if spare[0] < self.spare_kv or spare[1] < self.spare_queue:
            return 1
        if len(free) < 2:
            return 0
        after = [sum(loads) / (len(free) - 1) for loads in zip(*free, strict=True)]
        return -int(self.kv - after[0] >= self.spare_kv and self.queue - after[1] >= self.spare_queue)
