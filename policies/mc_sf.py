"""Memory-constrained shortest first: MC-SF and MC-Benchmark (Jaillet et al., arXiv 2502.07115v5, from secondary notes).

Running requests continue without preemption. Waiting requests are admitted one by one, shortest predicted output first
(`order=shortest`, MC-SF) or first come, first served (`order=arrival`, MC-Benchmark), as long as the KV cache will hold all
requests at every predicted end. The first request that does not fit blocks the others. In rounds of one token, a request
with prompt s holds s + j tokens when it makes its j-th token, one more than in cbatch.

Differs from the paper: outputs longer than predicted, and blocks of several tokens, can fill the cache. The newest running
request is then preempted. Ties: arrival.
"""

from cbatch import ConfigError, Plan, Request, View, WholePrompts
from policies.predictors import Predictor
from policies.shared.future_memory import most_held
from policies.shared.waiting import WaitingQueue


class McSf(WholePrompts):
    steady = False  # set by each plan: True if no request waits

    def __init__(self, predictor: Predictor, order: str = "shortest") -> None:
        if order not in ("shortest", "arrival"):
            raise ConfigError(f"policy.order={order}: choose shortest (MC-SF) or arrival (MC-Benchmark)")
        self.predictor, self.order = predictor, order
        self._queue = WaitingQueue(predictor.output if order == "shortest" else lambda request: request.arrival_time)

    def plan(self, view: View) -> Plan:
        plan, self.steady = view.plan(), not view.waiting
        plan.add_decodes(preempt_newest=True)
        if not plan.plan.preempt and view.waiting and plan.can_admit:
            held = [request.num_tokens for request in view.running]
            left = [self.predictor.remaining(request) for request in view.running]
            for request in self._queue.in_order(view):
                held.append(request.num_tokens)
                left.append(self.predictor.remaining(request))
                too_much = most_held(held, left) > view.kv.num_tokens and len(held) > 1
                if too_much or not plan.add(request, whole=True):
                    break
        return plan.build()

    def on_wait(self, request: Request) -> None:
        self._queue.push(request)

    def on_finish(self, request: Request) -> None:
        self.predictor.observe(request)
