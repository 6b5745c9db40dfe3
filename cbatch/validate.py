"""The rules that every plan must keep. A plan that breaks one is an error that names the policy; it is never repaired."""

from __future__ import annotations

from operator import attrgetter
from typing import NoReturn

import numpy as np

from cbatch.errors import PlanError
from cbatch.malformed import malformed
from cbatch.plan import CheckedPlan, Plan
from cbatch.policy import Limits
from cbatch.request import Request, Status
from cbatch.request_table import ONE, Counters, Ints
from cbatch.state import State


def validate(plan: Plan, state: State, limits: Limits, policy_name: str) -> CheckedPlan:
    """Check a plan against the state before anything is changed.

    Raises:
        PlanError: naming policy, iteration, rule and request.
    """
    if not isinstance(plan, Plan):
        raise PlanError(
            f"policy {policy_name}, iteration {state.iteration}: plan() returned {type(plan).__name__}, "
            "not a cbatch.Plan"
        )
    if not _looks_well_formed(plan):
        _refuse_malformed(plan, state, policy_name)
    try:
        return _Check(plan, state, limits, policy_name).run()
    except PlanError:
        raise
    except Exception as error:
        _refuse_malformed(plan, state, policy_name, error)
        raise PlanError(
            f"policy {policy_name}, iteration {state.iteration}: the plan cannot be checked ({type(error).__name__}: "
            f"{error}); a policy may change nothing but its own state"
        ) from error


def _looks_well_formed(plan: Plan) -> bool:
    """Whether the fields are of the right kind; their entries are looked at only if they lead to an error."""
    try:
        return (
            isinstance(plan.requests, list)
            and isinstance(plan.num_tokens, list)
            and len(plan.requests) == len(plan.num_tokens)
            and isinstance(plan.preempt, list)
            and isinstance(plan.reject, list)
            and type(plan.reserve) is dict
            and type(plan.note) is str
            and (plan.pad_to is None or type(plan.pad_to) is int)
            and plan.wake_at is None
        )
    except AttributeError:  # one was deleted
        return False


def _refuse_malformed(plan: Plan, state: State, policy_name: str, error: Exception | None = None) -> None:
    """
    Raises:
        PlanError: the plan is malformed, which `error` may have come of.
    """
    if found := malformed(plan):
        raise PlanError(
            f"policy {policy_name}, iteration {state.iteration}: malformed plan ({found}); "
            "see cbatch.Plan for what each field holds"
        ) from error


class _Check:
    def __init__(self, plan: Plan, state: State, limits: Limits, policy_name: str) -> None:
        self.plan, self.state, self.limits, self.policy_name = plan, state, limits, policy_name

    def run(self) -> CheckedPlan:
        requests = self.plan.requests
        if self.plan.preempt or self.plan.reject:
            self._check_departures()
        newcomers, rows, num_decodes = self._check_members()
        counts = np.array(self.plan.num_tokens or np.zeros(0, np.int64))
        counters, room = self.state.table.counters(rows), self.state.pool.room[rows]
        if newcomers:
            self._set_start_values(rows, counters, room)
        num_tokens = 0
        if requests:
            self._check_counts(counts, self.state.table.ready(rows, counters))
            num_tokens = sum(self.plan.num_tokens)
            self._check_limits(len(newcomers), num_tokens)
        end = counters.computed + counts
        taking, num_blocks = self._check_blocks(end, room)
        return CheckedPlan(
            self.plan, newcomers, rows, counts, end, taking, num_blocks, num_tokens, num_decodes, counters
        )

    def _set_start_values(self, rows: Ints, counters: Counters, room: Ints) -> None:
        """Requests that were never admitted have no row yet: nothing computed, no blocks held."""
        known, total, computed = counters
        for place in (rows < 0).nonzero()[0].tolist():
            request = self.plan.requests[place]
            known[place] = total[place] = request.num_prompt_tokens
            computed[place] = room[place] = 0

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

    def _check_members(self) -> tuple[list[Request], Ints, int]:
        """Every request runs or waits, and stands in the plan once.

        Returns those that wait, the rows of all, and how many decode.

        Most plans begin with all decodes in their order: those are known to run, and their rows are at hand.
        """
        requests, decoding = self.plan.requests, self.state.decoding
        num_known = len(decoding.members)
        if requests[:num_known] != decoding.members:
            num_known = 0
        others = requests[num_known:]
        if num_known and not others:
            return [], decoding.rows, num_known
        unique = decoding.without(set(others)) if num_known else set(others)
        if len(unique) < len(others):
            twice = next(request for request in requests if requests.count(request) > 1)
            self._fail("a request is named once in a plan", twice, f"it is named {requests.count(twice)} times")
        outside = self.state.running.without(unique)
        newcomers = [request for request in others if request in outside] if outside else []
        for request in newcomers:
            if request.status is not Status.WAITING or request not in self.state.waiting:
                self._fail(
                    "a planned request is waiting, or running with tokens left", request, f"it is {_standing(request)}"
                )
        rows = np.fromiter(map(attrgetter("row"), others), np.int64, len(others))
        if num_known:
            return newcomers, np.concatenate((decoding.rows, rows)), num_known
        return newcomers, rows, len(unique) - len(decoding.without(unique))

    def _check_counts(self, counts: Ints, ready: Ints) -> None:
        requests = self.plan.requests
        if counts.dtype != np.int64:
            self._fail("token counts are whole numbers", requests[0], f"got {self.plan.num_tokens}")
        wrong = counts > ready
        if min(self.plan.num_tokens) < 1:
            wrong |= counts < ONE
        place = int(wrong.argmax())
        if wrong[place]:
            self._fail(
                "a request computes at least 1 token and no more than are ready",
                requests[place],
                f"{counts[place]} planned, {ready[place]} ready",
            )

    def _check_limits(self, num_newcomers: int, num_tokens: int) -> None:
        plan, limits = self.plan, self.limits
        if len(plan.requests) > limits.max_batch:
            self._fail(
                f"an iteration holds at most max_batch={limits.max_batch} requests",
                plan.requests[limits.max_batch],
                f"{len(plan.requests)} planned",
            )
        if num_tokens > limits.max_tokens:
            self._fail(
                f"an iteration holds at most max_tokens={limits.max_tokens} tokens",
                plan.requests[-1],
                f"{num_tokens} planned",
            )
        if num_newcomers:
            running = len(self.state.running) - len(plan.preempt) + num_newcomers
            if running > limits.max_running:
                self._fail(
                    f"at most {limits.max_running} requests are admitted at once",
                    plan.requests[-1],
                    f"{running} with this plan",
                )
        if plan.pad_to is not None and not num_tokens <= plan.pad_to <= limits.max_tokens:
            self._fail(
                "pad_to lies between the tokens planned and max_tokens",
                plan.requests[0],
                f"pad_to={plan.pad_to}, {num_tokens} planned, max_tokens={limits.max_tokens}",
            )

    def _check_blocks(self, end: Ints, room: Ints) -> tuple[Ints, list[int]]:
        """The blocks that the plan takes are free, or come free at once by its own preemptions.

        end: tokens that each request will have in the KV cache. room: tokens that its blocks hold.

        Returns the places of the requests that take blocks, and how many each.
        """
        plan, pool = self.plan, self.state.pool
        if plan.reserve:
            end = self._raised_to_reserved(end)
        taking, num_blocks = pool.lacking(room, end)
        needed, free = sum(num_blocks), pool.num_free
        if plan.preempt:
            free += self._blocks_coming_free()
        if needed > free:
            place = int(taking[np.argmax(np.cumsum(num_blocks) > free)])
            self._fail(
                "the KV blocks that a plan takes must be free",
                plan.requests[place],
                f"{needed} blocks planned, {free} free",
            )
        return taking, num_blocks

    def _raised_to_reserved(self, end: Ints) -> Ints:
        end = end.copy()
        for request, num_tokens in self.plan.reserve.items():
            try:
                place = self.plan.requests.index(request)
            except ValueError:
                self._fail("a reservation belongs to a planned request", request, "it is not in the plan")
            if not isinstance(num_tokens, int | np.integer):
                self._fail("a request reserves a whole number of tokens", request, f"{num_tokens!r} reserved")
            if num_tokens > request.max_tokens:
                self._fail(
                    "a request reserves no more KV cache than its longest length",
                    request,
                    f"{num_tokens} tokens reserved, {request.max_tokens} at most",
                )
            end[place] = max(end[place], num_tokens)
        return end

    def _blocks_coming_free(self) -> int:
        """By the plan's own preemptions, of requests that no iteration in flight still uses."""
        state = self.state
        return sum(
            state.pool.held_by(request.row) for request in self.plan.preempt if state.in_flight_until(request) is None
        )

    def _fail(self, rule: str, request: Request, found: str) -> NoReturn:
        raise PlanError(
            f"policy {self.policy_name}, iteration {self.state.iteration}, request {request.id}: "
            f"illegal plan ({found}); rule: {rule}"
        )


def _standing(request: Request) -> str:
    return {
        Status.PENDING: "not of this run, or has not arrived",
        Status.WAITING: "waiting",
        Status.RUNNING: "running with its last token in flight",
        Status.FINISHED: "finished",
    }[request.status]
