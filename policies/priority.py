"""vLLM V1's scheduler by priority: most urgent first, least urgent preempted (vLLM 0.22.1 or 0.33.0).

Waiting requests are admitted by (priority, arrival). If the KV cache is full, the running request with the lowest priority is
preempted; among equals, the latest arrival. An urgent request never preempts others to be admitted. In cbatch a higher number
is more urgent, in vLLM a lower number. `boost` limits how far its preemptions raise a request's priority, for admission and
preemption: 0 is vLLM's rule; 3 is the rule of PR vllm#51574, which protects requests from repeated preemption.
After a request that preempted itself, version 0.22.1 serves no other in this iteration; 0.33.0 goes on with the next.
"""

from collections.abc import Iterable

from cbatch import ConfigError, Request, View
from policies.shared.waiting import WaitingQueue
from policies.vllm_v1 import VERSIONS, VllmV1


class Priority(VllmV1):
    depends_on = ("priorities",)
    steady = True

    def __init__(self, budget: int, long_prefill: int = 0, boost: int = 0, version: str = VERSIONS[0]) -> None:
        super().__init__(budget, long_prefill, version=version)
        self.goes_on = version != VERSIONS[0]
        if boost < 0:
            raise ConfigError(f"policy.boost={boost}: give 0 for none, or how far preemptions raise a priority")
        self.boost = boost
        self._queue = WaitingQueue(self._urgency)

    def on_wait(self, request: Request) -> None:
        self._queue.push(request)

    def waiting(self, view: View) -> Iterable[Request]:
        return self._queue.in_order(view)

    def next_victim(self, running: list[Request], view: View) -> Request:
        return max(running, key=lambda request: (self._urgency(request), request.arrival_time, request.id))

    def _urgency(self, request: Request) -> int:
        """Returns the rank of a request; lower is more urgent."""
        return -request.priority - min(request.num_preemptions, self.boost)
