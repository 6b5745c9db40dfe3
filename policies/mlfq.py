"""Skip-join multi-level feedback queue: FastServe (Wu et al., arXiv 2305.05920; NSDI 2026), pausing and recomputing.

Queue p has a quantum of q0 * 2^p seconds. A request joins the first queue whose quantum holds its prefill (`skip_join`; otherwise
queue 0), and moves to the tail of the next queue when its iterations have used up the quantum. An iteration takes the first requests
of the highest queues; others pause and keep their KV cache (give `max_running` above `batch`). If the KV cache is full, the tail of
the lowest queue is preempted and recomputed; a waiting request blocks others. A request idle for `promote_after` seconds moves to the
tail of queue 0. Source: the code (LLMServe/FastServe, fastserve/scheduler.py). Differences: docs/policies/mlfq.md.
"""

from itertools import chain

from cbatch import BatchShape, ConfigError, Plan, Request, View, WholePrompts
from policies.shared.quanta import Quanta, Unserved
from policies.shared.repeats import Repeats
from policies.shared.waiting import WaitingQueue


class MLFQ(WholePrompts):
    depends_on = ("places",)
    steady = False  # set by each plan: True if a single decoding request is left

    def __init__(self, quantum: float = 0.01, skip_join: bool = True, promote_after: float = 3.0) -> None:
        """quantum, promote_after: seconds."""
        if not quantum > 0 or not promote_after > 0:
            raise ConfigError(f"policy: {quantum=} and {promote_after=} must be above 0 seconds")
        self.quantum, self.skip_join, self.promote_after = quantum, skip_join, promote_after
        self._arrived, self._quanta, self._unserved = list[Request](), Quanta(quantum), Unserved()
        self._waiting, self._repeats = WaitingQueue(self._quanta.place), Repeats(self._quanta.charge)

    def plan(self, view: View) -> Plan:
        self._repeats.catch_up(view)
        for request in self._arrived:
            if request.finished_at is None:
                whole = view.cost.predict(BatchShape(((request.num_prompt_tokens, 0),)))
                self._quanta.join(request, self._quanta.first_queue(whole) if self.skip_join else 0)
                self._unserved.add(request, request.arrival_time)
        self._arrived.clear()
        self._promote(view)
        plan = view.plan()
        for request in self._waiting.beside(view.running, plan, view):
            if not self._waiting.add_by_preempting(request, plan, view) or not plan.rows_left:
                break
        shape, running = self._repeats.charge(plan.plan, view), view.running
        self.steady = len(running) == shape.num_decodes == 1 and not (shape.chunks or view.waiting)
        self._repeats.expect([*running] if self.steady else [])
        for request in chain(running, plan.plan.requests):
            if self._quanta.place(request)[0] > 0:
                self._unserved.add(request, view.now)
        return plan.build()

    def on_arrival(self, request: Request) -> None:
        self._arrived.append(request)

    def on_wait(self, request: Request) -> None:
        self._waiting.push(request)

    def on_finish(self, request: Request) -> None:
        self._unserved.discard(request)
        self._repeats.defer(self._quanta.leave, request)

    def _promote(self, view: View) -> None:
        for request in self._unserved.longer_than(self.promote_after, view):
            if self._quanta.place(request)[0] > 0:
                self._quanta.join(request, 0)
                self._waiting.push(request)
