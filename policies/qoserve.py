"""QoServe (first named Niyama): deadlines with a hybrid priority, the largest chunks that decodes tolerate, relegation (ASPLOS 2026).

After all decodes, prompts share the chunk (`chunking=slack`) by `order`: `hybrid` is deadline + alpha * tokens left, between `edf`
and `srpf` (shortest remaining prompt first); `fcfs` is by arrival. A prompt that can no longer meet its deadline is relegated behind
all others, not rejected. Nothing is preempted. A request without objectives gets the slowest deadline of the paper. Source: paper and
code (microsoft/sarathi-serve, niyama_asplos2026, deadline_scheduler.py). Differences: docs/policies/qoserve.md.
"""

from heapq import merge

from cbatch import ConfigError, Described, Limits, Plan, Request, StepRecord, View
from policies.chunking import ChunkSelector, Slack
from policies.predictors import Predictor
from policies.shared.deadlines import deadline, misses
from policies.shared.step_times import StepTimes
from policies.shared.waiting import WaitingQueue

ORDERS = ("hybrid", "edf", "srpf", "fcfs")
SMOOTHING, FIRST_RATE = 0.995, 8500.0  # prompt tokens per second


class QoServe(Described):
    steady = False  # set by each plan: True if no request waits

    def __init__(
        self,
        chunking: ChunkSelector,
        predictor: Predictor,
        order: str = "hybrid",
        alpha: float = 0.008,
        relegate: bool = True,
    ) -> None:
        """alpha: seconds per remaining token, in `hybrid`."""
        if order not in ORDERS or alpha < 0:
            raise ConfigError(f"policy: {order=} must be one of {', '.join(ORDERS)}, {alpha=} at least 0")
        self.depends_on = ("objectives", *["slack"] * (not isinstance(chunking, Slack)))
        self.chunking, self.predictor, self.order = chunking, predictor, order
        self.alpha, self.relegate, self._relegated = alpha, relegate, set[Request]()
        self._queue, self._times = WaitingQueue(self.urgency), StepTimes(FIRST_RATE, SMOOTHING)

    def check(self, limits: Limits) -> None:
        self.chunking.check(limits)

    def plan(self, view: View) -> Plan:
        plan, self.steady = view.plan(), not view.waiting
        plan.add_decodes()
        tokens = self.chunking.num_tokens(view, plan.num_tokens)
        for request in merge(sorted(view.prefilling, key=self.urgency), self._queue.in_order(view), key=self.urgency):
            if tokens <= 0:
                break
            if self.relegate and self._misses(request, view):
                self._relegated.add(request)
                self._queue.push(request)
            elif granted := plan.add(request, tokens, reserve=request.max_tokens):
                tokens -= granted
            else:  # the request does not fit; begun prompts continue
                for begun in sorted(view.prefilling, key=self.urgency):
                    tokens -= plan.add(begun, tokens)
                break
        return plan.build()

    def on_wait(self, request: Request) -> None:
        self._queue.push(request)

    def on_step(self, record: StepRecord) -> None:
        self._times.note(record)

    def on_finish(self, request: Request) -> None:
        self.predictor.observe(request)
        self._relegated.discard(request)
        self.chunking.observe(request)

    def urgency(self, request: Request) -> tuple[bool, float]:
        """Returns the rank of a request; lower comes first."""
        left = request.num_ready + (0.0 if request.slo.ttft is not None else self.predictor.output(request))
        key = {"hybrid": deadline(request) + self.alpha * left, "edf": deadline(request), "srpf": left}
        return request in self._relegated, key.get(self.order, request.arrival_time)

    def _misses(self, request: Request, view: View) -> bool:
        waits = view.is_waiting(request) and request not in self._relegated
        return waits and misses(request, self.predictor.output(request), self._times.prompt_rate, view.now)
