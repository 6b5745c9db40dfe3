"""Learning to rank: the shortest predicted output first, for all requests, in each iteration (Fu et al., NeurIPS 2024).

Running and waiting requests are ranked by (promoted, predicted output). An iteration takes them in that order until the batch is full
or one does not fit; the others pause, or are preempted from the lowest rank where the KV cache is short. A request that was
left out of `starvation` iterations is promoted before all others for `period` iterations in which it is taken.

Source: the code (hao-ai-lab/vllm-ltr, vllm/core/scheduler.py; 200 and 10 are its starv200-period10), the paper (arXiv 2408.15792) in abstract. Differs
from it: what is swapped to host memory there is recomputed here. Ties: arrival. Pausing needs places: give `max_running` above
`batch`. `predictor=ranks` models a ranking model.
"""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from itertools import chain

from cbatch import ConfigError, Plan, PlanBuilder, Refusal, Request, View
from policies.predictors import Predictor
from policies.waiting import WaitingQueue


class LTR:
    def __init__(self, predictor: Predictor, starvation: float = 200, period: int = 10) -> None:
        """starvation, period: iterations; starvation=.inf: no promotion."""
        if not starvation >= 1 or period < 1:
            raise ConfigError(f"policy: {starvation=} and {period=} must be at least 1 iteration")
        self.predictor, self.starvation, self.period = predictor, starvation, period
        self._arrived: list[Request] = []
        self._score: dict[Request, float] = {}
        self._queue = WaitingQueue(self._predicted)
        self._idle_since: OrderedDict[Request, int] = OrderedDict()  # iteration of the last service, longest ago first
        self._promoted: dict[Request, int] = {}  # iterations of promotion that are left

    def plan(self, view: View) -> Plan:
        self._promote(view.iteration)
        plan = view.plan()
        for request in self._ranked(view):
            if not self._grant(request, plan, view):
                break
        if plan.refusal is Refusal.PLACES:  # no waiting request can be admitted; the running ones continue
            for request in sorted(view.running, key=self._rank):
                self._grant(request, plan, view)
        for request in plan.plan.requests:
            self._served(request, view.iteration + 1)
            if request in self._promoted:
                self._promoted[request] -= 1
                if not self._promoted[request]:
                    del self._promoted[request]
        self._queue.push(*plan.plan.preempt)
        return plan.build()

    def on_arrival(self, request: Request) -> None:
        self._score[request] = self.predictor.output(request)
        self._arrived.append(request)
        self._queue.push(request)

    def on_finish(self, request: Request) -> None:
        self.predictor.observe(request)
        for kept in (self._score, self._idle_since, self._promoted):
            kept.pop(request, None)

    def _promote(self, iteration: int) -> None:
        for request in self._arrived:
            self._idle_since[request] = iteration
        self._arrived.clear()
        while self._idle_since:
            request, since = next(iter(self._idle_since.items()))
            if iteration - since < self.starvation:
                break
            self._promoted[request] = self.period
            self._served(request, iteration)

    def _served(self, request: Request, iteration: int) -> None:
        self._idle_since[request] = iteration
        self._idle_since.move_to_end(request)

    def _rank(self, request: Request) -> tuple[bool, float, int]:
        return request not in self._promoted, self._score[request], request.id

    def _predicted(self, request: Request) -> float:
        return self._score[request]

    def _ranked(self, view: View) -> Iterator[Request]:
        """Promoted requests come twice, the second time to no effect."""
        first = sorted(self._promoted, key=self._rank)
        return chain(first, merge(sorted(view.running, key=self._rank), self._queue.in_order(view), key=self._rank))

    def _grant(self, request: Request, plan: PlanBuilder, view: View) -> bool:
        """Whether requests of a lower rank may still get something."""
        while not plan.add(request, whole=True):
            if plan.refusal in (Refusal.NAMED, Refusal.NOT_READY):
                return True
            if plan.refusal is not Refusal.BLOCKS:
                return False
            if plan.wait_for_blocks(request, request.num_ready):
                return not view.is_waiting(request)
            taken = {*plan.plan.requests, *plan.plan.preempt, request}
            victims = [other for other in view.running if other not in taken]
            if not victims:
                return False
            plan.preempt(max(victims, key=self._rank))
        return True
