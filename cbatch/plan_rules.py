"""The rules that every plan must keep. A plan that breaks one is an error that names the policy; it is never repaired."""

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import NoReturn, TypeVar

import numpy as np

from cbatch.errors import PlanError
from cbatch.plan import Plan
from cbatch.plan_builder import PlanBuilder
from cbatch.plan_form import form_fault, looks_well_formed
from cbatch.request import Request, Status
from cbatch.view import View

T = TypeVar("T")


def check_rules(plan: Plan, view: View, policy_name: str) -> None:
    """Check a plan against the view that it was made from; raises PlanError naming policy, iteration, rule, request."""
    rules = Rules(plan, view, policy_name)
    rules.enforce(rules.check)


class Rules:
    """The rules that every plan must keep, over the public view."""

    def __init__(self, plan: Plan, view: View, policy_name: str) -> None:
        self.plan, self.view, self.policy_name = plan, view, policy_name

    @property
    def _where(self) -> str:
        return f"policy {self.policy_name}, iteration {self.view.iteration}"

    def enforce(self, check: Callable[[], T]) -> T:
        """Returns what a check of a well-formed plan returns.

        If it raises anything but a PlanError, `Rules.check` finds the rule that is broken.
        """
        self._check_form()
        try:
            return check()
        except PlanError:
            raise
        except Exception as error:
            if check != self.check:
                self.enforce(self.check)
            self._refuse_malformed(error)
            found = f"{type(error).__name__}: {error}"
            message = f"the plan cannot be checked ({found}); a policy may change only its own state"
            raise PlanError(f"{self._where}: {message}") from error

    def check(self) -> None:
        """Check every rule, request by request. The engine checks legal plans faster, in `plan_check`."""
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
        """Every request runs or waits, and the plan names it once. Returns how many wait."""
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
        for request, count in zip(requests, counts, strict=True):
            if not 1 <= count <= request.num_ready:
                rule = "a request computes at least 1 token and no more than are ready"
                self._fail(rule, request, f"{count} planned, {request.num_ready} ready")

    def check_limits(self, num_newcomers: int, num_tokens: int) -> None:
        """Check the totals of a plan that computes something."""
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
            found = f"pad_to={plan.pad_to}, {num_tokens} planned, max_tokens={limits.max_tokens}"
            self._fail("pad_to lies between the tokens planned and max_tokens", plan.requests[0], found)

    def _check_blocks(self) -> None:
        """The blocks that the plan takes are free, or come free at once by its own preemptions."""
        kv = self.view.kv
        reserved = self.reserved_tokens()
        lacking = (
            kv.num_lacking(request, max(request.num_computed + count, reserved.get(place, 0)))
            for place, (request, count) in enumerate(self.plan)
        )
        taken = list(accumulate(lacking))
        free = kv.num_free + self.blocks_coming_free()
        if taken and taken[-1] > free:
            place = next(place for place, total in enumerate(taken) if total > free)
            found = f"{taken[-1]} blocks planned, {free} free"
            self._fail("the KV blocks that a plan takes must be free", self.plan.requests[place], found)

    def reserved_tokens(self) -> dict[int, int]:
        """Tokens that the plan reserves, by the request's place in it."""
        places: dict[int, int] = {}
        for request, num_tokens in self.plan.reserve.items():
            if request not in self.plan.requests:
                self._fail("a reservation belongs to a planned request", request, "it is not in the plan")
            if not isinstance(num_tokens, int | np.integer):
                self._fail("a request reserves a whole number of tokens", request, f"{num_tokens!r} reserved")
            if num_tokens > request.max_tokens:
                rule = "a request reserves no more KV cache than its longest length"
                self._fail(rule, request, f"{num_tokens} tokens reserved, {request.max_tokens} at most")
            places[self.plan.requests.index(request)] = int(num_tokens)
        return places

    def blocks_coming_free(self) -> int:
        """Blocks that the plan's own preemptions free at once."""
        return sum(self.view.kv.freed_by_preempting(request).now for request in self.plan.preempt)

    def _waits(self, request: Request) -> bool:
        return self.view.is_waiting(request) and request in self.view.waiting

    def _standing(self, request: Request) -> str:
        if self._waits(request):
            return "waiting"
        if request in self.view.running:
            return "running"
        ended = {Status.RUNNING: "running with its last token in flight", Status.FINISHED: "finished"}
        return ended.get(request.status, "not of this run, or has not arrived")

    def _fail(self, rule: str, request: Request, found: str) -> NoReturn:
        raise PlanError(f"{self._where}, request {request.id}: illegal plan ({found}); rule: {rule}")

    def _check_form(self) -> None:
        """Raises PlanError if it is not a `Plan`, or a field holds a value of the wrong kind."""
        if not isinstance(self.plan, Plan):
            remedy = "return plan.build()" if isinstance(self.plan, PlanBuilder) else "return a Plan, Plan() to wait"
            problem = f"plan() returned {type(self.plan).__name__}, not a cbatch.Plan"
            raise PlanError(f"{self._where}: {problem}; {remedy}")
        if not looks_well_formed(self.plan):
            self._refuse_malformed()

    def _refuse_malformed(self, error: Exception | None = None) -> None:
        """Raises PlanError if the plan is malformed, which may be the cause of `error`."""
        if found := form_fault(self.plan):
            message = f"malformed plan ({found}); see cbatch.Plan for what each field holds"
            raise PlanError(f"{self._where}: {message}") from error
