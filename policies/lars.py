"""LARS, least relative slack first, with chunks that fit a target time: Medha (Agrawal et al., arXiv 2409.17264).

Relative slack is the spare time before the first token is due (`slo.ttft`), divided by the time of the whole prompt. After all decodes
come the prompts with the least relative slack, with the largest chunks that keep the iteration's predicted time within `target`. At
most one prompt is long (longer than the target by itself); it gets at most a share 1 - slack of the target. Differences:
docs/policies/lars.md.
"""

from math import inf

from cbatch import BatchShape, ConfigError, Described, Plan, PlanBuilder, Request, View
from policies.chunking.target_time import largest_chunk
from policies.shared.falling_queue import FallingQueue

NEAREST = 64  # waiting requests that a plan considers


class LARS(Described):
    depends_on = ("ttft",)
    steady = False  # set by each plan: True if no request waits

    def __init__(self, target: float = 0.1, ttft: float = 10.0) -> None:
        """target: seconds of an iteration. ttft: seconds to the first token, for requests without such an objective."""
        if not target > 0 or not 0 < ttft < inf:
            raise ConfigError(f"policy: {target=} and {ttft=} must be above 0 seconds, and {ttft=} finite")
        self.target, self.ttft, self._waiting = target, ttft, FallingQueue()  # by relative slack
        self._begun: list[Request] = []  # to wait, since the latest plan
        self._whole: dict[Request, float] = {}  # predicted seconds of the prompt

    def plan(self, view: View) -> Plan:
        for request in filter(view.is_waiting, self._begun):
            whole = self._seconds(request, view)
            self._waiting.push(request, (self._due(request) - whole) / whole, 1 / whole)
        self._begun.clear()
        plan, self.steady = view.plan(), not view.waiting
        plan.add_decodes(preempt_newest=True)
        shape = BatchShape((), plan.num_requests, sum(request.num_tokens for request in plan.plan.requests))
        long_taken = blocked = False
        prompts = self._by_slack(plan, view)
        for request in prompts:
            is_long = self._seconds(request, view) > self.target
            if (is_long and long_taken) or (blocked and view.is_waiting(request)):
                continue
            share = 1 - min(max(self.slack(request, view), 0.0), 1.0) if is_long else 1.0
            tokens = largest_chunk(request, shape, share * self.target, view.cost)
            if is_long and not tokens:
                continue  # it yields the whole iteration
            if not (granted := plan.add(request, tokens, reserve=request.num_tokens)):
                blocked = True  # the first request without room blocks the other waiting requests
                continue
            shape = shape._replace(chunks=(*shape.chunks, (granted, request.num_computed)))
            long_taken |= is_long
        for request in prompts:
            if not plan.num_requests:  # all long prompts yield, or the target is too short for any chunk
                plan.add(request, view.limits.tile, reserve=request.num_tokens)
        for request in plan.plan.requests[shape.num_decodes :]:
            self._waiting.discard(request)
        return plan.build()

    def on_wait(self, request: Request) -> None:
        self._begun.append(request)

    def on_finish(self, request: Request) -> None:
        self._waiting.discard(request)
        self._whole.pop(request, None)

    def slack(self, request: Request, view: View) -> float:
        """Returns the current relative slack of a request."""
        whole = self._seconds(request, view)
        return (self._due(request) - view.now - whole * request.num_ready / request.num_tokens) / whole

    def _due(self, request: Request) -> float:
        return request.arrival_time + (request.slo.ttft or self.ttft)

    def _by_slack(self, plan: PlanBuilder, view: View) -> list[Request]:
        """Returns prefilling requests, and waiting requests if there is room, least relative slack first."""
        ranked = [(self.slack(request, view), 0, request.id, request) for request in view.prefilling]
        nearest = self._waiting.least(view.now, NEAREST) if plan.can_admit else ()
        ranked += [(slack, 1, request.id, request) for slack, request in nearest]
        return [request for *_, request in sorted(ranked)]

    def _seconds(self, request: Request, view: View) -> float:
        """Returns the predicted seconds of the whole prompt."""
        if request not in self._whole:
            self._whole[request] = view.cost.predict(BatchShape(((request.num_prompt_tokens, 0),)))
        return self._whole[request]
