"""QoServe (first Niyama): deadlines with a hybrid priority, chunks as large as decodes can bear, relegation (ASPLOS 2026).

All decodes come first. Prompts share the chunk, which `chunking=slack` makes as large as the decodes can bear, by `order`: `hybrid`
is deadline + alpha * tokens left, between `edf` (alpha = 0) and `srpf` (shortest remaining prompt first); `fcfs` is by arrival. A
prompt that cannot meet its deadline any more is relegated behind all others, not rejected. Nothing is preempted.

Interactive requests have the objectives `slo.ttft` and `slo.tbt`, others `slo.total`; without any, the slowest of the paper's.
Source: the paper and the code (microsoft/sarathi-serve, branch niyama_asplos2026, deadline_scheduler.py). Differs from them as
docs/policies/qoserve.md says.
"""

from collections.abc import Iterator
from heapq import merge

from cbatch import ConfigError, Limits, Plan, Request, StepRecord, View
from policies.chunking import ChunkSelector
from policies.predictors import Predictor
from policies.shared.deadlines import deadline, misses
from policies.shared.step_times import StepTimes
from policies.shared.waiting import WaitingQueue

ORDERS = ("hybrid", "edf", "srpf", "fcfs")
SMOOTHING, FIRST_RATE = 0.995, 8500.0  # prompt tokens per second


class QoServe:
    def __init__(
        self,
        chunking: ChunkSelector,
        predictor: Predictor,
        order: str = "hybrid",
        alpha: float = 0.008,
        relegate: bool = True,
    ) -> None:
        """alpha: seconds per token left, of `hybrid`."""
        if order not in ORDERS or alpha < 0:
            raise ConfigError(f"policy: {order=} is one of {', '.join(ORDERS)}, {alpha=} at least 0")
        self.chunking, self.predictor = chunking, predictor
        self.order, self.alpha, self.relegate = order, alpha, relegate
        self._queue = WaitingQueue(self.urgency)
        self._relegated: set[Request] = set()
        self._times = StepTimes(FIRST_RATE, SMOOTHING)

    def check(self, limits: Limits) -> None:
        self.chunking.check(limits)

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes()
        tokens = self.chunking.num_tokens(view, plan.num_tokens)
        for request in self._prompts(view):
            if tokens <= 0:
                break
            if self.relegate and self._misses(request, view):
                self._relegated.add(request)
                self._queue.push(request)
            elif granted := plan.add(request, tokens, reserve=request.max_tokens):
                tokens -= granted
            else:  # it does not fit; prompts that have begun go on
                for begun in sorted(view.prefilling, key=self.urgency):
                    tokens -= plan.add(begun, tokens)
                break
        return plan.build()

    def on_arrival(self, request: Request) -> None:
        self._queue.push(request)

    def on_step(self, record: StepRecord) -> None:
        self._times.note(record)

    def on_finish(self, request: Request) -> None:
        self.predictor.observe(request)
        self._relegated.discard(request)
        self.chunking.observe(request)

    def urgency(self, request: Request) -> tuple[bool, float]:
        """Lower comes first."""
        left: float = request.num_ready
        if request.slo.ttft is None:
            left += self.predictor.output(request)
        key = {"hybrid": deadline(request) + self.alpha * left, "edf": deadline(request), "srpf": left}
        return request in self._relegated, key.get(self.order, request.arrival_time)

    def _prompts(self, view: View) -> Iterator[Request]:
        return merge(sorted(view.prefilling, key=self.urgency), self._queue.in_order(view), key=self.urgency)

    def _misses(self, request: Request, view: View) -> bool:
        if not view.is_waiting(request) or request in self._relegated:
            return False
        return misses(request, self.predictor.output(request), self._times.prompt_rate, view.now)
