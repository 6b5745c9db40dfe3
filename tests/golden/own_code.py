"""A policy and a router of a user: `policy._target_=own_code.ShortestFirst`, `backend.router._target_=own_code.ToLast`."""

from collections.abc import Sequence

from cbatch import Plan, Request, View


class ShortestFirst:
    """Decodes first; then chunks of prompts, those with the fewest tokens left first."""

    def __init__(self, budget: int = 512) -> None:
        self.budget = budget

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes(preempt_newest=True)
        for request in sorted([*view.prefilling, *view.waiting[:100]], key=lambda request: request.num_ready):
            if plan.num_tokens < self.budget:
                plan.add(request, self.budget - plan.num_tokens, reserve=request.num_tokens)
        return plan.build()


class ToLast:
    """Sends every third request to the first replica, the others to the last one."""

    def choose(self, request: Request, replicas: Sequence[object]) -> int:
        return 0 if request.id % 3 == 0 else len(replicas) - 1
