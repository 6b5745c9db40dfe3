"""Learning to rank: shortest predicted output first, among all requests, in each iteration (Fu et al., NeurIPS 2024).

Running and waiting requests are ranked by (promoted, predicted output). An iteration takes requests in that order until the batch is
full or a request does not fit. The other requests pause or, if KV cache is short, are preempted from the lowest rank on. A request
left out of `starvation` iterations is promoted before all others until it has been in `period` iterations.

Source: the code (hao-ai-lab/vllm-ltr, vllm/core/scheduler.py; 200 and 10 are its starv200-period10), and the abstract of the paper
(arXiv 2408.15792). Difference: preempted requests are recomputed, not swapped to host memory. Ties: arrival. Pausing needs places:
give `max_running` above `batch`. `predictor=ranks` models a ranking model.
"""

from collections import OrderedDict

from cbatch import ConfigError, Plan, Refusal, Request, View, WholePrompts
from policies.predictors import Predictor
from policies.shared.waiting import WaitingQueue


class LTR(WholePrompts):
    depends_on = ("places",)
    steady = False  # set by each plan: True only if no request waits

    def __init__(self, predictor: Predictor, starvation: float = 200, period: int = 10) -> None:
        """starvation, period: iterations; starvation=.inf: no promotion."""
        if not starvation >= 1 or period < 1:
            raise ConfigError(f"policy: {starvation=} and {period=} must be at least 1 iteration")
        self.predictor, self.starvation, self.period = predictor, starvation, period
        self._arrived: list[Request] = []
        self._score: dict[Request, float] = {}
        self._queue = WaitingQueue(self._rank)
        self._planned, self._iteration = dict[Request, None](), 0  # of the last plan
        self._served: dict[Request, None] = {}  # by it, which inside vLLM need not be all that it names
        self._idle_since = OrderedDict[Request, int]()  # first idle iteration of other requests, ascending
        self._promoted: dict[Request, int] = {}  # remaining iterations of promotion

    def plan(self, view: View) -> Plan:
        self._note_served(view)
        self._promote(view)
        plan = view.plan()
        for request in self._queue.beside(view.running, plan, view):
            if not self._queue.add_by_preempting(request, plan, view):
                break
            full = plan.refusal in (Refusal.ROWS, Refusal.TOKENS)
            if full or (plan.refusal is Refusal.BLOCKS and view.is_waiting(request)):
                break
        self._planned, self._iteration = dict.fromkeys(plan.plan.requests), view.iteration
        ranks_matter = view.waiting or self._idle_since or self._promoted
        self.steady = len(self._planned) == len(view.running) and not ranks_matter
        return plan.build()

    def on_arrival(self, request: Request) -> None:
        self._score[request] = self.predictor.output(request)
        self._arrived.append(request)

    def on_wait(self, request: Request) -> None:
        self._queue.push(request)

    def on_finish(self, request: Request) -> None:
        self.predictor.observe(request)
        for kept in (self._score, self._planned, self._served, self._idle_since, self._promoted):
            kept.pop(request, None)

    def _note_served(self, view: View) -> None:
        """Notes whom the last plan has served. Who waits still was not admitted."""
        served = {request: None for request in self._planned if not view.is_waiting(request)}
        self._idle_since.update((request, self._iteration) for request in self._served if request not in served)
        for request in served.keys() - self._served.keys():
            self._idle_since.pop(request, None)
        self._served = served
        for request in self._promoted.keys() & served.keys():
            self._promoted[request] -= 1
            if not self._promoted[request]:
                del self._promoted[request]

    def _promote(self, view: View) -> None:
        self._idle_since |= dict.fromkeys(filter(view.is_waiting, self._arrived), view.iteration)
        self._arrived.clear()
        while self._idle_since and view.iteration - next(iter(self._idle_since.values())) >= self.starvation:
            request, _ = self._idle_since.popitem(last=False)  # until its next service
            self._promoted[request] = self.period
            self._queue.push(request)

    def _rank(self, request: Request) -> tuple[bool, float]:
        return request not in self._promoted, self._score[request]
