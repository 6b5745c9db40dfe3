"""A random policy: any plan that the rules allow, drawn from a seed."""

import random

from cbatch import Plan, PlanBuilder, Request, View


class FuzzPolicy:
    """Adds requests in any order, with any part of what they could compute, and preempts, rejects, reserves and pads.

    It breaks the rule that a policy draws no random numbers, so that no order of events is spared the runtime. It never
    starves: where nothing runs and nothing was planned, it frees the KV cache for the oldest request.
    """

    def __init__(self, seed: int, *, preempts: float = 0.05, rejects: float = 0.0) -> None:
        """preempts, rejects: probability for each request at each iteration. Drafts are drawn where there is a drafter."""
        self._random = random.Random(seed)
        self._preempts = preempts
        self._rejects = rejects

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        for request in list(view.running):
            if self._random.random() < self._preempts:
                plan.preempt(request)
        candidates = [request for request in view.running if request not in plan.plan.preempt]
        for request in list(view.waiting):
            if self._random.random() < self._rejects:
                plan.reject(request, "the dice say so")
            else:
                candidates.append(request)
        self._random.shuffle(candidates)
        for request in candidates:
            if self._random.random() < 0.8:
                self._add(plan, view, request)
        if not plan.num_requests and not view.num_in_flight:
            self._make_progress(plan, view, candidates)
        if self._random.random() < 0.3:
            plan.pad_to(plan.num_tokens + self._random.randint(0, plan.tokens_left))
        return plan.build()

    def _add(self, plan: PlanBuilder, view: View, request: Request) -> None:
        if (most := view.drafts.most) and self._random.random() < 0.7:
            plan.draft(request, self._random.randint(0, most + 1))
        elif request.num_ready:
            wanted = self._random.choice([1, self._random.randint(1, request.num_ready), request.num_ready])
            reserve = request.max_tokens if self._random.random() < 0.2 else 0
            plan.add(request, wanted, reserve=reserve)

    def _make_progress(self, plan: PlanBuilder, view: View, candidates: list[Request]) -> None:
        if not candidates:
            return
        oldest = min(candidates, key=lambda request: request.id)
        for request in view.running:
            if request is not oldest and request not in plan.plan.preempt:
                plan.preempt(request)
        plan.add(oldest)
