"""Skip-join multi-level feedback queue: FastServe (Wu et al., arXiv 2305.05920; NSDI 2026), pausing and recomputing.

Queue p has a quantum of q0 * 2^p seconds. A request joins the first whose quantum holds its prefill (`skip_join`; otherwise queue 0),
and moves to the tail of the next when its iterations have used up the quantum. Each takes the first requests of the highest
queues; others pause and keep their KV cache (give `max_running` above `batch`). Where that is full, the tail of the lowest queue is
preempted and recomputed; a waiting one blocks others. After `promote_after` seconds without service a request moves to the tail
of queue 0. Source: the code (LLMServe/FastServe, fastserve/scheduler.py). docs/policies/mlfq.md says where this differs.
"""

from collections import OrderedDict
from itertools import count

from cbatch import BatchShape, ConfigError, Plan, Request, View
from policies.shared.step_times import shape_of
from policies.shared.waiting import WaitingQueue


class MLFQ:
    def __init__(self, quantum: float = 0.01, skip_join: bool = True, promote_after: float = 3.0) -> None:
        """quantum, promote_after: seconds."""
        if not quantum > 0 or not promote_after > 0:
            raise ConfigError(f"policy: {quantum=} and {promote_after=} must be above 0 seconds")
        self.quantum, self.skip_join, self.promote_after = quantum, skip_join, promote_after
        self._arrived: list[Request] = []
        self._num_joined = 0
        self._place: dict[Request, tuple[int, int]] = {}  # number of the queue, and of the joining
        self._waiting = WaitingQueue(self._place_of)
        self._used: dict[Request, float] = {}  # seconds of the quantum
        self._served_at: OrderedDict[Request, float] = OrderedDict()  # longest ago first; not of promoted ones

    def plan(self, view: View) -> Plan:
        for request in self._arrived:
            self._join(request, self._first_queue(request, view) if self.skip_join else 0)
            self._waiting.push(request)
            self._served_at[request] = view.now
        self._arrived.clear()
        self._promote(view)
        plan = view.plan()
        for request in self._waiting.beside(view.running, plan, view):
            if not self._waiting.add_by_preempting(request, plan, view) or not plan.rows_left:
                break
        self._charge(plan.plan, view)
        self._waiting.push(*plan.plan.preempt)
        return plan.build()

    def on_arrival(self, request: Request) -> None:
        self._arrived.append(request)

    def on_finish(self, request: Request) -> None:
        del self._place[request], self._used[request]
        self._served_at.pop(request, None)

    def _place_of(self, request: Request) -> tuple[int, int]:
        return self._place[request]

    def _first_queue(self, request: Request, view: View) -> int:
        seconds = view.cost.predict(BatchShape(((request.num_prompt_tokens, 0),)))
        return next(number for number in count() if self.quantum * 2**number >= seconds)

    def _join(self, request: Request, number: int) -> None:
        """Enters a queue at its tail."""
        self._num_joined += 1
        self._place[request], self._used[request] = (number, self._num_joined), 0.0

    def _promote(self, view: View) -> None:
        while self._served_at and view.now - next(iter(self._served_at.values())) >= self.promote_after:
            request, _ = self._served_at.popitem(last=False)
            if self._place[request][0] > 0:
                self._join(request, 0)
                if view.is_waiting(request):
                    self._waiting.push(request)

    def _charge(self, plan: Plan, view: View) -> None:
        seconds = view.cost.predict(shape_of(plan)) if len(plan) else 0.0
        for request in plan.requests:
            self._used[request] += seconds
            self._served_at[request] = view.now
            self._served_at.move_to_end(request)
            if self._used[request] > self.quantum * 2 ** (number := self._place[request][0]):
                self._join(request, number + 1)
