"""The rules that every plan must keep. A plan that breaks one is an error that names the policy; it is never repaired."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from cbatch.errors import PlanError
from cbatch.plan import Plan
from cbatch.policy import Limits
from cbatch.request import Ints, Request, Status
from cbatch.state import State


def validate(plan: Plan, state: State, limits: Limits, policy_name: str) -> Ints:
    """Check a plan against the state before anything is changed.

    Returns:
        The plan's token counts, [batch].

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

    def run(self) -> Ints:
        plan = self.plan
        if plan.preempt or plan.reject:
            self._check_departures()
        if not plan.requests:
            return np.zeros(0, np.int64)
        newcomers = self._check_members()
        counts = np.array(plan.num_tokens)
        if counts.dtype != np.int64:
            self._fail("token counts must be whole numbers", plan.requests[0], f"got {plan.num_tokens}")
        ready = self._ready(newcomers)
        if (counts < 1).any() or (counts > ready).any():
            place = int(np.flatnonzero((counts < 1) | (counts > ready))[0])
            self._fail("a request computes at least 1 token and no more than are ready", plan.requests[place],
                       f"{counts[place]} planned, {ready[place]} ready")  # fmt: skip
        self._check_limits(len(newcomers), int(counts.sum()))
        self._check_blocks(counts)
        return counts

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
        """Every request runs or waits, and stands in the plan once. Returns those that wait."""
        requests = self.plan.requests
        newcomers = []
        for request in requests:
            if request not in self.state.running:
                if request.status is not Status.WAITING or request not in self.state.waiting:
                    self._fail("a planned request is waiting, or running with tokens left", request,
                               f"it is {_standing(request)}")  # fmt: skip
                newcomers.append(request)
        if len(set(requests)) < len(requests):
            twice = next(request for request in requests if requests.count(request) > 1)
            self._fail("a request is named once in a plan", twice, f"it is named {requests.count(twice)} times")
        return newcomers

    def _ready(self, newcomers: list[Request]) -> Ints:
        requests = self.plan.requests
        if not newcomers:
            return self.state.table.ready(self._rows())
        return np.array([request.num_ready for request in requests], np.int64)

    def _rows(self) -> Ints:
        requests = self.plan.requests
        return np.fromiter((request.row for request in requests), np.int64, len(requests))

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

    def _check_blocks(self, counts: Ints) -> None:
        """The blocks that the plan takes are free, or come free at once by its own preemptions."""
        plan, state, pool = self.plan, self.state, self.state.pool
        free = pool.num_free
        for request in plan.preempt:
            if state.in_flight_until(request) is None:
                free += int(pool.held[request.row])
        rows = self._rows()
        known = rows >= 0  # the others were never admitted: nothing computed, nothing held
        end = np.where(known, state.table.computed[rows], 0) + counts
        for request, num_tokens in plan.reserve.items():
            if request not in plan.requests:
                self._fail("a reservation belongs to a planned request", request, "it is not in the plan")
            place = plan.requests.index(request)
            end[place] = max(end[place], num_tokens)
        held = np.where(known, pool.held[rows], 0)
        missing = np.maximum(-(-end // pool.block_size) - held, 0)
        if int(missing.sum()) > free:
            place = int(np.argmax(np.cumsum(missing) > free))
            self._fail("the KV blocks that a plan takes must be free", plan.requests[place],
                       f"{missing.sum()} blocks planned, {free} free")  # fmt: skip
        if (end > pool.tables.shape[1] * pool.block_size).any():
            place = int(np.argmax(end))
            self._fail("a request holds no more KV cache than its longest length", plan.requests[place],
                       f"{end[place]} tokens planned or reserved")  # fmt: skip

    def _fail(self, rule: str, request: Request, found: str) -> NoReturn:
        raise PlanError(f"policy {self.policy_name}, iteration {self.state.iteration}, request {request.id}: "
                        f"illegal plan ({found}); rule: {rule}")  # fmt: skip


def _standing(request: Request) -> str:
    if request.status is Status.RUNNING:
        return "running with its last token in flight"
    return {Status.PENDING: "not of this run, or not arrived"}.get(request.status, request.status.value)
