"""The rules that every plan must keep, and the engine's check of the rules.

A plan that breaks a rule raises an error that names the policy; plans are never repaired. `check_plan` detects illegal plans on
the engine's arrays, for a whole batch at once. `Rules.check` then finds the broken rule on the public view, request by request.
"""

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from math import isfinite
from numbers import Integral, Real
from operator import attrgetter
from typing import NoReturn, TypeVar

import numpy as np

from cbatch.errors import OverCommitError, PlanError
from cbatch.plan import CheckedPlan, Plan
from cbatch.plan_builder import PlanBuilder
from cbatch.request import Ints, Request, Status
from cbatch.request_table import ONE, Counters
from cbatch.state import State
from cbatch.view import EngineView, View

T = TypeVar("T")

_KINDS = {"requests": list, "num_tokens": list, "preempt": list, "reject": list, "reserve": dict, "give_up": dict}
_KINDS["note"] = str
_VALUES = attrgetter(*_KINDS, "least_free")
_ALL_KINDS = (*_KINDS.values(), int)


def check_rules(plan: Plan, view: View, policy_name: str) -> None:
    """Checks a plan against its view. Raises PlanError, which names policy, iteration, rule and request."""
    rules = Rules(plan, view, policy_name)
    rules.enforce(rules.check)


class Rules:
    """The rules that every plan must keep, checked on the public view."""

    def __init__(self, plan: Plan, view: View, policy_name: str) -> None:
        self.plan, self.view, self.policy_name = plan, view, policy_name

    @property
    def _where(self) -> str:
        return f"policy {self.policy_name}, iteration {self.view.iteration}"

    def enforce(self, check: Callable[[], T]) -> T:
        """Returns the result of `check`. If `check` raises an exception other than PlanError, `Rules.check` finds the broken rule."""
        try:
            self._check_form()
            return check()
        except PlanError:
            raise
        except Exception as error:
            if check != self.check:
                self.enforce(self.check)
            what = f"the plan cannot be checked ({type(error).__name__}: {error})"
            remedy = "see cbatch.Plan for what its fields hold, and change only the policy's own state"
            raise PlanError(f"{self._where}: {what}; {remedy}") from error

    def check(self) -> None:
        """Checks every rule, request by request."""
        self.check_departures()
        num_newcomers = self._check_members()
        if self.plan.requests:
            self._check_counts()
            self.check_limits(num_newcomers, sum(self.plan.num_tokens))
        self._check_blocks()

    def check_departures(self) -> None:
        plan, view = self.plan, self.view
        rejected = [request for request, _ in plan.reject]
        for request in plan.preempt:
            if request not in view.running:
                self._fail("only a running request can be preempted", request, f"it is {self._standing(request)}")
        for request in rejected:
            if not self._waits(request):
                self._fail("only a waiting request can be rejected", request, f"it is {self._standing(request)}")
        departing = [*plan.preempt, *rejected]
        for request in departing:
            if departing.count(request) > 1 or request in plan.requests:
                self._fail("a request is named once in a plan", request, "it is preempted or rejected, and named again")

    def _check_members(self) -> int:
        """Checks that every request runs or waits, and is named once. Returns the number of waiting requests."""
        requests, running = self.plan.requests, self.view.running
        count = Counter(requests)
        if len(count) < len(requests):
            twice = next(request for request in requests if count[request] > 1)
            self._fail("a request is named once in a plan", twice, f"it is named {count[twice]} times")
        newcomers = [request for request in requests if request not in running]
        for request in newcomers:
            if not self._waits(request):
                rule = "a planned request is waiting, or running with tokens left"
                self._fail(rule, request, f"it is {self._standing(request)}")
        return len(newcomers)

    def _check_counts(self) -> None:
        requests, counts = self.plan.requests, self.plan.num_tokens
        if np.array(counts).dtype != np.int64:
            self._fail("token counts are whole numbers", requests[0], f"got {counts}")
        drafts = self.view.drafts
        for request, count in zip(requests, counts, strict=True):
            granted = drafts.granted(request) if drafts.most else 0
            if not 1 <= count <= request.num_ready + granted:
                rule = "a request computes at least 1 token and no more than are ready"
                drafted = f", with at most {granted} of {drafts.most} drafts" if drafts.most else ""
                self._fail(rule, request, f"{count} planned, {request.num_ready} ready{drafted}")

    def check_limits(self, num_newcomers: int, num_tokens: int) -> None:
        """Checks the totals of a nonempty plan."""
        plan, limits = self.plan, self.view.limits
        if len(plan.requests) > limits.max_batch:
            rule = f"an iteration holds at most max_batch={limits.max_batch} requests"
            self._fail(rule, plan.requests[limits.max_batch], f"{len(plan.requests)} planned")
        if num_tokens > limits.max_tokens:
            rule = f"an iteration holds at most max_tokens={limits.max_tokens} tokens"
            self._fail(rule, plan.requests[-1], f"{num_tokens} planned")
        if num_newcomers:
            surplus = num_newcomers - self.view.num_places - len(plan.preempt)
            if surplus > 0:
                rule = f"at most {limits.max_running} requests are admitted at once"
                self._fail(rule, plan.requests[-1], f"{limits.max_running + surplus} with this plan")
        if plan.pad_to is not None and not num_tokens <= plan.pad_to <= limits.max_tokens:
            problem = f"pad_to={plan.pad_to}, {num_tokens} planned, max_tokens={limits.max_tokens}"
            self._fail("pad_to lies between the tokens planned and max_tokens", plan.requests[0], problem)

    def _check_blocks(self) -> None:
        """Checks that the plan takes only free blocks, including blocks that its own preemptions free at once."""
        kv = self.view.kv
        reserved = self.reserved_tokens()
        lacking = (
            kv.num_lacking(request, max(request.num_computed + count, reserved.get(place, 0)))
            for place, (request, count) in enumerate(self.plan)
        )
        taken = list(accumulate(lacking))
        free = kv.num_free + self.num_gained()
        if taken and taken[-1] > free:
            place = next(place for place, total in enumerate(taken) if total > free)
            problem = f"{taken[-1]} blocks planned, {free} free"
            rule = "the KV blocks that a plan takes must be free"
            self._fail(rule, self.plan.requests[place], problem, OverCommitError)

    def reserved_tokens(self) -> dict[int, int]:
        """Returns the tokens that the plan reserves, by the request's place in the plan."""
        places: dict[int, int] = {}
        for request, num_tokens in self.plan.reserve.items():
            if request not in self.plan.requests:
                self._fail("a reservation belongs to a planned request", request, "it is not in the plan")
            if not isinstance(num_tokens, int | np.integer):
                self._fail("a request reserves a whole number of tokens", request, f"{num_tokens!r} reserved")
            if num_tokens < 0:
                self._fail("a request reserves at least 0 tokens of KV cache", request, f"{num_tokens} reserved")
            if num_tokens > request.max_tokens:
                rule = "a request reserves no more KV cache than its longest length"
                self._fail(rule, request, f"{num_tokens} tokens reserved, {request.max_tokens} at most")
            places[self.plan.requests.index(request)] = int(num_tokens)
        return places

    def num_gained(self) -> int:
        """Returns the blocks that the plan's preemptions free at once: see `KVView.num_gained`."""
        return self.view.kv.num_gained(self.plan.preempt, filter(self.view.is_waiting, self.plan.requests))

    def _waits(self, request: Request) -> bool:
        return self.view.is_waiting(request) and request in self.view.waiting

    def _standing(self, request: Request) -> str:
        if self._waits(request):
            return "waiting"
        if request in self.view.running:
            return "running"
        ended = {Status.RUNNING: "running with its last token in flight", Status.FINISHED: "finished"}
        return ended.get(request.status, "not of this run, or has not arrived")

    def _fail(self, rule: str, request: Request, problem: str, kind: type[PlanError] = PlanError) -> NoReturn:
        raise kind(f"{self._where}, request {request.id}: illegal plan ({problem}); rule: {rule}")

    def _check_form(self) -> None:
        """Raises PlanError if the plan is not a `Plan`, or a field has a value of the wrong type."""
        plan = self.plan
        if not isinstance(plan, Plan):
            remedy = "return plan.build()" if isinstance(plan, PlanBuilder) else "return a Plan, Plan() to wait"
            remedy = "end it with return plan.build(), or return Plan() to wait" if plan is None else remedy
            problem = f"plan() returned {type(plan).__name__}, not a cbatch.Plan"
            raise PlanError(f"{self._where}: {problem}; {remedy}")
        usual = (*map(type, _VALUES(plan)),) == _ALL_KINDS and plan.wake_at is plan.pad_to is None
        if not usual or len(plan.requests) != len(plan.num_tokens):
            self._check_each_field()

    def _check_each_field(self) -> None:
        plan = self.plan
        for name, kind in _KINDS.items():
            if not isinstance(getattr(plan, name), kind):
                self._refuse(name, f"not a {kind.__name__}")
        if len(plan.requests) != len(plan.num_tokens):
            self._refuse("num_tokens", f"of {len(plan.num_tokens)} counts for {len(plan.requests)} requests")
        if plan.pad_to is not None and (not isinstance(plan.pad_to, Integral) or isinstance(plan.pad_to, bool)):
            self._refuse("pad_to", "not a whole number or None")
        if plan.wake_at is not None and not (isinstance(plan.wake_at, Real) and isfinite(plan.wake_at)):
            self._refuse("wake_at", "not a time in seconds or None")
        if type(plan.least_free) is not int:
            self._refuse("least_free", "not a whole number")

    def _refuse(self, name: str, problem: str) -> NoReturn:
        what = f"{name} is a {type(getattr(self.plan, name)).__name__}, {problem}"
        raise PlanError(f"{self._where}: malformed plan ({what}); see cbatch.Plan for what each field holds")


class IllegalError(Exception):
    """The plan breaks a rule, or may do so; `Rules.check` finds the rule."""


def check_plan(plan: Plan, state: State, view: EngineView, policy_name: str) -> CheckedPlan:
    """Checks a plan before the state changes. Raises PlanError like `check_rules`."""
    rules = Rules(plan, view, policy_name)
    return rules.enforce(lambda: _check(plan, state, rules))


def _check(plan: Plan, state: State, rules: Rules) -> CheckedPlan:
    requests = plan.requests
    if plan.preempt or plan.reject:
        rules.check_departures()
    newcomers, rows, num_decodes = _members(requests, state)
    counts = np.array(plan.num_tokens or np.zeros(0, np.int64))
    counters, room = state.table.counters(rows), state.pool.room[rows]
    if newcomers:
        _set_start_values(requests, rows, counters, room, state)
    num_tokens, drafts = 0, None
    if requests:
        ready = state.table.ready(rows, counters)
        if state.drafts.most and (drafts := state.drafts.planned(requests, rows, counts - ready)) is not None:
            ready += drafts
        wrong = (counts < ONE) | (counts > ready)
        if counts.dtype != np.int64 or wrong[wrong.argmax()]:
            raise IllegalError
        num_tokens = sum(plan.num_tokens)
        rules.check_limits(len(newcomers), num_tokens)
    end = kept = counters.computed + counts
    if plan.reserve:
        kept = end.copy()
        for place, reserved in rules.reserved_tokens().items():
            kept[place] = max(kept[place], reserved)
    taking, num_blocks = state.pool.lacking(room, kept)
    gains = plan.preempt or (newcomers and state.cache is not None)
    if sum(num_blocks) > state.pool.num_free + (state.num_gained(plan.preempt, newcomers) if gains else 0):
        raise IllegalError
    return CheckedPlan(
        plan, newcomers, rows, counts, end, taking, num_blocks, num_tokens, num_decodes, counters, drafts
    )


def _members(requests: list[Request], state: State) -> tuple[list[Request], Ints, int]:
    """Returns the waiting requests, the rows of all requests, and the number of decodes."""
    latest = state.latest  # a policy may have edited its list
    if latest is not None and requests == latest.requests and requests is not latest.requests:
        return [], latest.rows, latest.num_decode_tokens
    decoding, members = state.decoding, state.decoding.members
    num_known = len(members)
    if requests[:num_known] != members:  # most plans begin with all decodes in their order
        num_known = 0
    others = requests[num_known:]
    if num_known and not others:
        return [], decoding.rows, num_known
    unique = decoding.without(set(others)) if num_known else set(others)
    if len(unique) < len(others):
        raise IllegalError
    outside = state.running.without(unique)
    newcomers = [request for request in others if request in outside] if outside else []
    for request in newcomers:
        if request.status is not Status.WAITING or request not in state.waiting:
            raise IllegalError
    rows = np.empty(len(requests), np.int64)
    if num_known:
        rows[:num_known] = decoding.rows
    rows[num_known:] = [request._row for request in others]
    return newcomers, rows, num_known or len(unique) - len(decoding.without(unique))


def _set_start_values(requests: list[Request], rows: Ints, counters: Counters, room: Ints, state: State) -> None:
    """Sets the counters of newcomers without a row and, with a prefix cache, the cached tokens of waiting requests."""
    known, total, computed = counters
    for place in (rows < 0).nonzero()[0].tolist():
        known[place] = total[place] = requests[place].num_prompt_tokens
        computed[place] = room[place] = 0
    if state.cache is not None:
        for place, request in enumerate(requests):
            if request.status is Status.WAITING:
                computed[place] = room[place] = request.num_computed
