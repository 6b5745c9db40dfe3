"""SLAI: decodes at the last schedulable moment, prompts before (Bari, Hegde, de Veciana, arXiv 2508.01002, abstract only).

The last schedulable time of a decode is when its next token is due (`slo.tbt`), minus `offset` mean iterations. Each iteration takes,
within the budget: decodes whose time has come, earliest first; prefilling prompts, least recently served first; waiting prompts,
shortest first; then other decodes. A decode without a KV block is preempted; if its time has come, the last
prefilling prompts are preempted first. `offset=null` is the dynamic rule: 5, and 10 from 96% of the KV cache on.
Source: the authors' code (agrimUT/SLAI, slai_scheduler.py). Differences: docs/policies/slai.md.
"""

from cbatch import ConfigError, Described, Plan, PlanBuilder, Refusal, Request, StepRecord, View
from policies.chunking.budget import check_budget
from policies.shared.deadlines import LastTimes
from policies.shared.step_times import StepTimes
from policies.shared.waiting import WaitingQueue

MOST_CRITICAL, CROWDED, EARLY, LATE = 128, 0.96, 10.0, 5.0


class Slai(Described):
    depends_on = ("tbt",)

    def __init__(
        self,
        budget: int = 512,
        order: str = "spf",
        offset: float | None = None,
        tbt: float = 0.2,
        by_priority: bool = False,
    ) -> None:
        """tbt: seconds, for requests without an objective. by_priority: higher `Request.priority` first."""
        check_budget(budget)
        if order not in {"spf", "fcfs"} or budget < 1 or not tbt > 0 or not (offset or 0) >= 0:
            ranges = f"{budget=} at least 1, {tbt=} above 0, {offset=} null or at least 0"
            raise ConfigError(f"policy: {order=} must be spf or fcfs, {ranges}")
        self.budget, self.order, self.offset, self.tbt, self.by_priority = budget, order, offset, tbt, by_priority
        self._queue, self._last, self._times = WaitingQueue(self._urgency), LastTimes(tbt), StepTimes()
        self._served: dict[Request, int] = {}  # iteration of the last chunk

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        crowded = view.kv.num_free < (1 - CROWDED) * view.kv.num_blocks
        offset = self.offset if self.offset is not None else EARLY if crowded else LATE
        last = self._last.update(view, offset * self._times.mean)
        ready, _ = view.ready_decodes(len(view.decoding))
        decodes = sorted(ready, key=lambda request: (last[request], request.arrival_time, request.id))
        prompts = sorted(view.prefilling, key=lambda request: self._served.get(request, -1))
        for request in [request for request in decodes if last[request] <= view.now][:MOST_CRITICAL]:
            self._decode(request, plan, prompts)
        for request in prompts:
            self._prompt(request, plan, view)
        for request in self._queue.in_order(view):
            if not self._prompt(request, plan, view):
                break
        for request in decodes:
            if plan.num_tokens < self.budget:
                self._decode(request, plan, [])
        return plan.build()

    def on_wait(self, request: Request) -> None:
        self._queue.push(request)

    def on_step(self, record: StepRecord) -> None:
        self._times.note(record)

    def on_finish(self, request: Request) -> None:
        self._last.forget(request)
        self._served.pop(request, None)

    def _urgency(self, request: Request) -> tuple[int, float]:
        length_or_time = request.num_tokens if self.order == "spf" else request.arrival_time
        return -request.priority if self.by_priority else 0, length_or_time

    def _decode(self, request: Request, plan: PlanBuilder, prompts: list[Request]) -> None:
        """Adds a decode. If it lacks a block, preempts the last prompts or, without prompts, the request itself."""
        while not plan.add(request, 1) and plan.refusal is Refusal.BLOCKS and not plan.wait_for_blocks(request, 1):
            plan.preempt(prompts.pop() if prompts else request)

    def _prompt(self, request: Request, plan: PlanBuilder, view: View) -> int:
        left = self.budget - plan.num_tokens
        if granted := plan.add(request, left, reserve=request.num_tokens) if left > 0 else 0:
            self._served[request] = view.iteration
        return granted
