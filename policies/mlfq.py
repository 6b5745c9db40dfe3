"""Skip-join multi-level feedback queue: FastServe (Wu et al., arXiv 2305.05920; NSDI 2026), in its pause-and-recompute variant.

Queue p has a quantum of q0 * 2^p seconds. A request joins the first queue whose quantum holds its prefill (`skip_join`; otherwise
queue 0), and moves to the tail of the next one when the iterations that it took part in have used up the quantum.
Each iteration takes the first requests of the highest queues; the others pause and keep their KV cache. Where that is full, the
request at the tail of the lowest queue is preempted and recomputed. Waiting `promote_after` seconds leads to the tail of queue 0.

Source: the code (LLMServe/FastServe, fastserve/scheduler.py); the paper from secondary notes. Differs from both: an iteration is charged with
its predicted time when it is planned; nothing is swapped to host memory; promotion is looked at in each plan, and the paper's
is after 0.3 s. Pausing needs places: give `max_running` above `batch`.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator

from cbatch import BatchShape, ConfigError, Plan, PlanBuilder, Refusal, Request, View


class MLFQ:
    def __init__(self, quantum: float = 0.01, skip_join: bool = True, promote_after: float = 3.0) -> None:
        """quantum, promote_after: seconds."""
        if not quantum > 0 or not promote_after > 0:
            raise ConfigError(f"policy: {quantum=} and {promote_after=} must be above 0 seconds")
        self.quantum, self.skip_join, self.promote_after = quantum, skip_join, promote_after
        self._arrived: list[Request] = []
        self._queues: defaultdict[int, OrderedDict[Request, None]] = defaultdict(OrderedDict)
        self._level: dict[Request, int] = {}
        self._used: dict[Request, float] = {}  # seconds of the quantum
        self._served_at: OrderedDict[Request, float] = OrderedDict()  # longest ago first

    def plan(self, view: View) -> Plan:
        for request in self._arrived:
            self._join(request, self._first_level(request, view) if self.skip_join else 0)
            self._served_at[request] = view.now
        self._arrived.clear()
        self._promote(view.now)
        plan = view.plan()
        for request in self._in_order():
            if not self._grant(request, plan, view):
                break
        self._charge(plan.build(), view)
        return plan.build()

    def on_arrival(self, request: Request) -> None:
        self._arrived.append(request)

    def on_finish(self, request: Request) -> None:
        del self._queues[self._level.pop(request)][request], self._used[request], self._served_at[request]

    def _in_order(self) -> Iterator[Request]:
        return (request for level in sorted(self._queues) for request in self._queues[level])

    def _first_level(self, request: Request, view: View) -> int:
        seconds, level = view.cost.predict(BatchShape(((request.num_prompt_tokens, 0),))), 0
        while self.quantum * 2**level < seconds:
            level += 1
        return level

    def _join(self, request: Request, level: int) -> None:
        """Enters a queue at its tail."""
        if request in self._level:
            del self._queues[self._level[request]][request]
        self._level[request], self._used[request] = level, 0.0
        self._queues[level][request] = None

    def _promote(self, now: float) -> None:
        while self._served_at and now - (first := next(iter(self._served_at.items())))[1] >= self.promote_after:
            self._served_at.move_to_end(first[0])
            self._served_at[first[0]] = now
            self._join(first[0], 0)

    def _grant(self, request: Request, plan: PlanBuilder, view: View) -> bool:
        """Whether requests further down may still get something."""
        while not plan.add(request, whole=True) and plan.refusal is Refusal.BLOCKS:
            if plan.wait_for_blocks(request, request.num_ready):
                return True
            victims = (other for level in sorted(self._queues, reverse=True) for other in reversed(self._queues[level]))
            taken = {*plan.plan.requests, *plan.plan.preempt, request}
            victim = next((other for other in victims if other in view.running and other not in taken), None)
            if victim is None:
                return False
            plan.preempt(victim)
        return plan.rows_left > 0

    def _charge(self, plan: Plan, view: View) -> None:
        chunks = tuple((tokens, request.num_computed) for request, tokens in plan if tokens > 1)
        decodes = [request for request, tokens in plan if tokens == 1]
        shape = BatchShape(chunks, len(decodes), sum(request.num_tokens for request in decodes))
        seconds = view.cost.predict(shape) if len(plan) else 0.0
        for request in plan.requests:
            self._used[request] += seconds
            self._served_at[request] = view.now
            self._served_at.move_to_end(request)
            if self._used[request] > self.quantum * 2 ** self._level[request]:
                self._join(request, self._level[request] + 1)
