"""The rules that every plan must keep. A plan that breaks one is an error that names the policy; it is never repaired."""

from __future__ import annotations

from operator import attrgetter
from typing import NoReturn, cast

import numpy as np

from cbatch.errors import PlanError
from cbatch.plan import CheckedPlan, Plan
from cbatch.policy import Limits
from cbatch.request import Ints, Request, Status
from cbatch.state import State


def validate(plan: Plan, state: State, limits: Limits, policy_name: str) -> CheckedPlan:
    """Check a plan against the state before anything is changed.

    Raises:
        PlanError: naming policy, iteration, rule and request.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"policy {policy_name}, iteration {state.iteration}: plan() returned {type(plan).__name__}, "
                        "not a cbatch.Plan")  # fmt: skip
    return _Check(plan, state, limits, policy_name).run()


class _Check:
    def __init__(self, plan: Plan, state: State, limits: Limits, policy_name: str) -> None:
        self.plan, self.state, self.limits, self.policy_name = plan, state, limits, policy_name

    def run(self) -> CheckedPlan:
        requests = self.plan.requests
        if self.plan.preempt or self.plan.reject:
            self._check_departures()
        newcomers = self._check_members() if requests else []
        rows = np.fromiter(map(attrgetter("row"), requests), np.int64, len(requests))
        counts = np.array(self.plan.num_tokens or np.zeros(0, np.int64))
        if requests:
            self._check_counts(rows, counts)
            self._check_limits(len(newcomers), int(counts.sum()))
        missing = self._check_blocks(rows, counts)
        return CheckedPlan(self.plan, newcomers, rows, counts, missing)

    def _check_departures(self) -> None:
        rejected = [request for request, _ in self.plan.reject]
        for request in self.plan.preempt:
            if request not in self.state.running:
                self._fail("only a running request can be preempted", request, f"it is {_standing(request)}")
        for request in rejected:
            if request.status is not Status.WAITING or request not in self.state.waiting:
                self._fail("only a waiting request can be rejected", request, f"it is {_standing(request)}")
        departing = [*self.plan.preempt, *rejected]
        for request in departing:
            if departing.count(request) > 1 or request in self.plan.requests:
                self._fail("a request is named once in a plan", request, "it is preempted or rejected, and named again")

    def _check_members(self) -> list[Request]:
        """Every request runs or waits, and stands in the plan once. Returns those that wait, in plan order."""
        requests = self.plan.requests
        unique = set(requests)
        if len(unique) < len(requests):
            twice = next(request for request in requests if requests.count(request) > 1)
            self._fail("a request is named once in a plan", twice, f"it is named {requests.count(twice)} times")
        outside = self.state.running.without(unique)
        newcomers = [request for request in requests if request in outside] if outside else []
        for request in newcomers:
            if request.status is not Status.WAITING or request not in self.state.waiting:
                self._fail("a planned request is waiting, or running with tokens left", request,
                           f"it is {_standing(request)}")  # fmt: skip
        return newcomers

    def _check_counts(self, rows: Ints, counts: Ints) -> None:
        requests = self.plan.requests
        if counts.dtype != np.int64:
            self._fail("token counts are whole numbers", requests[0], f"got {self.plan.num_tokens}")
        ready = self.state.table.ready(rows)
        for place in np.flatnonzero(rows < 0).tolist():
            ready[place] = requests[place].num_ready
        wrong = (counts < 1) | (counts > ready)
        if wrong.any():
            place = int(np.argmax(wrong))
            self._fail("a request computes at least 1 token and no more than are ready", requests[place],
                       f"{counts[place]} planned, {ready[place]} ready")  # fmt: skip

    def _check_limits(self, num_newcomers: int, num_tokens: int) -> None:
        plan, limits = self.plan, self.limits
        if len(plan) > limits.max_batch:
            self._fail(f"an iteration holds at most max_batch={limits.max_batch} requests", plan.requests[limits.max_batch],
                       f"{len(plan)} planned")  # fmt: skip
        if num_tokens > limits.max_tokens:
            self._fail(f"an iteration holds at most max_tokens={limits.max_tokens} tokens", plan.requests[-1],
                       f"{num_tokens} planned")  # fmt: skip
        running = len(self.state.running) - len(plan.preempt) + num_newcomers
        if num_newcomers and running > limits.max_running:
            self._fail(f"at most {limits.max_running} requests are admitted at once", plan.requests[-1],
                       f"{running} with this plan")  # fmt: skip
        if plan.pad_to is not None and not num_tokens <= plan.pad_to <= limits.max_tokens:
            self._fail("pad_to lies between the tokens planned and max_tokens", plan.requests[0],
                       f"pad_to={plan.pad_to}, {num_tokens} planned, max_tokens={limits.max_tokens}")  # fmt: skip

    def _check_blocks(self, rows: Ints, counts: Ints) -> Ints:
        """The blocks that the plan takes are free, or come free at once by its own preemptions. Returns them, [batch]."""
        plan, pool = self.plan, self.state.pool
        start, held = self.state.table.computed[rows], pool.held[rows]
        start[rows < 0] = held[rows < 0] = 0  # never admitted: nothing computed, nothing held
        end = start + counts
        if plan.reserve:
            self._raise_to_reserved(end)
        missing = np.maximum(-(-end // pool.block_size) - held, 0)
        needed, free = int(missing.sum()), pool.num_free + self._blocks_coming_free()
        if needed > free:
            place = int(np.argmax(np.cumsum(missing) > free))
            self._fail("the KV blocks that a plan takes must be free", plan.requests[place],
                       f"{needed} blocks planned, {free} free")  # fmt: skip
        return cast(Ints, missing)

    def _raise_to_reserved(self, end: Ints) -> None:
        for request, num_tokens in self.plan.reserve.items():
            if request not in self.plan.requests:
                self._fail("a reservation belongs to a planned request", request, "it is not in the plan")
            if num_tokens > request.max_tokens:
                self._fail("a request reserves no more KV cache than its longest length", request,
                           f"{num_tokens} tokens reserved, {request.max_tokens} at most")  # fmt: skip
            place = self.plan.requests.index(request)
            end[place] = max(end[place], num_tokens)

    def _blocks_coming_free(self) -> int:
        """By the plan's own preemptions, of requests that no iteration in flight still uses."""
        state = self.state
        return sum(int(state.pool.held[request.row]) for request in self.plan.preempt
                   if state.in_flight_until(request) is None)  # fmt: skip

    def _fail(self, rule: str, request: Request, found: str) -> NoReturn:
        raise PlanError(f"policy {self.policy_name}, iteration {self.state.iteration}, request {request.id}: "
                        f"illegal plan ({found}); rule: {rule}")  # fmt: skip


def _standing(request: Request) -> str:
    return {
        Status.PENDING: "not of this run, or has not arrived",
        Status.WAITING: "waiting",
        Status.RUNNING: "running with its last token in flight",
        Status.FINISHED: "finished",
    }[request.status]
