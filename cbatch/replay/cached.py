"""Replays runs with a prefix cache by carrying out the recorded plans, since the content of the cache is not recorded."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from cbatch.cost import CostModel
from cbatch.drafts import Drafter, TableDrafts
from cbatch.errors import ReplayError, call
from cbatch.kv import Eviction, PrefixPool
from cbatch.plan import Plan
from cbatch.plan_check import check_plan
from cbatch.policy import HOOKS, Policy, name_of, optional_method
from cbatch.record import InFlight, RunRecord
from cbatch.replay.decisions import Decided, Decision, Recorded, StepEnd, cached_tokens
from cbatch.request import FinishReason, Request, Status, leaves_at, spec_of
from cbatch.request_table import RequestTable
from cbatch.state import State
from cbatch.view import EngineView


class Hooked:
    """Base class of replays: calls a policy's hooks, and knows the recorded end of each iteration."""

    _requests: Mapping[int, Request]

    def __init__(self, recorded: Recorded, policy: Policy) -> None:
        self._policy, self._where, self._iterations = policy, f"policy {name_of(policy)}", recorded.iterations
        self._ends = {event.record.iteration: event for event in recorded.events if isinstance(event, StepEnd)}
        hooks = (optional_method(policy, name) for name in HOOKS)
        self._on_arrival, self._on_wait, self._on_tokens, self._on_step, self._on_finish = hooks

    def put_back(self, planned: Decided) -> None:
        """Tells the policy which requests of its own plan still wait after the recorded one."""
        for request in [self._requests[id_] for id_, _ in planned.entries if id_ in self._requests]:
            if request.status is Status.WAITING:
                self._tell(self._on_wait, request)

    def _tell(self, method: Callable[[Any], Any], argument: object) -> None:
        call(self._where, method, argument)


class CachedReplay(Hooked):
    """Shows a policy the views of a run, and calls its hooks between them.

    Raises ReplayError if a newcomer finds other tokens than in the run, because `eviction` decides differently.
    """

    def __init__(
        self,
        recorded: Recorded,
        requests: Sequence[Request],
        policy: Policy,
        cost: CostModel,
        drafter: Drafter,
        eviction: Eviction,
    ) -> None:
        super().__init__(recorded, policy)
        limits = recorded.limits
        self._requests: dict[int, Request] = {request.id: Request.from_spec(spec_of(request)) for request in requests}
        lengths = Counter(chain.from_iterable(end.received for end in self._ends.values()))
        for id_ in chain.from_iterable(end.stopped for end in self._ends.values()):
            spec = replace(spec_of(self._requests[id_]), true_new_tokens=lengths[id_])
            self._requests[id_] = Request.from_spec(spec)
        rows, width = limits.max_running + limits.max_batch, limits.max_request_tokens
        pool = PrefixPool(recorded.num_blocks, recorded.block_size, rows, width, eviction, recorded.num_host_blocks)
        table = RequestTable(rows, limits.num_stages, width if recorded.token_values else None)
        self._state, self._record, self._in_flight = State(table, pool), RunRecord(), deque[InFlight]()
        self.view = EngineView(self._state, limits, cost, self._in_flight, self._record)
        if limits.max_drafts:
            self._state.drafts = TableDrafts(table, self._state.decoding, limits.max_drafts, drafter)
            self.view.update(drafts=self._state.drafts)
        assert self._state.cache is not None
        self._cache = self._state.cache

    def look(self, decision: Decision) -> None:
        """Lets requests arrive, and cancels requests whose clients have left."""
        state, seen = self._state, decision.seen
        self.view.update(now=seen.now)
        self._cache.expect(map(self._requests.__getitem__, decision.submitted))
        present = {*seen.waiting, *(progress.id for progress in seen.running)}
        for request in sorted([*state.waiting, *state.running], key=leaves_at):
            if request.id not in present:
                self._cancel(request, seen.now)
        if decision.cleared:
            self._cache.pool.clear()
        for request in map(self._requests.__getitem__, seen.waiting):
            if request.status is Status.PENDING:
                request.arrive(seen.now if request.id in self._iterations else None)
                self._cache.expect([request])
                state.waiting.add(request)
                self._tell(self._on_arrival, request)
                self._tell(self._on_wait, request)

    def carry_out(self, event: Decision) -> None:
        state, now, plan = self._state, event.seen.now, self._plan(event.decided)
        for (id_, tokens), (_, recorded) in zip(cached_tokens(plan), event.cached, strict=True):
            if tokens != recorded:
                finds = f"request {id_} finds {tokens} cached tokens, and {recorded} when recorded"
                remedy = "the eviction has changed since: record the run again"
                raise ReplayError(f"iteration {event.iteration}: {finds}; {remedy}")
        checked = check_plan(plan, state, self.view, "that was recorded")
        for request in plan.preempt:
            state.preempt(request)
            self._tell(self._on_wait, request)
        for request, why in plan.reject:
            state.end(request, FinishReason.REJECTED, now, why)
            self._tell(self._on_finish, request)
        self._cache.give_up(plan.give_up)
        if plan.requests:
            end = self._ends.get(event.iteration)
            times = (now, end.record.launched_at if end else now)
            self._in_flight.append(InFlight(state.apply(checked, now), None, times, (0, 0, 0, 0)))

    def _plan(self, decided: Decided) -> Plan:
        of = self._requests.__getitem__
        plan = Plan(((of(id_), count) for id_, count in decided.entries), note=decided.note)
        plan.preempt = [*map(of, decided.preempt)]
        plan.reject = [(of(id_), why) for id_, why in decided.reject]
        plan.reserve = {of(id_): num_tokens for id_, num_tokens in decided.reserve}
        plan.pad_to, plan.give_up = decided.pad_to, dict(decided.give_up)
        return plan

    def end(self, event: StepEnd) -> None:
        """Takes in the tokens of an iteration, and calls the policy's hooks in the engine's order."""
        step, record, table = self._in_flight.popleft().step, event.record, self._state.table
        for request in [step.requests[place] for place in step.sampled.tolist()]:
            if request.status is not Status.FINISHED and request.id not in event.received:
                self._cancel(request, record.received_at)
        counts = Counter(event.received)
        earlier = Counter[int]()  # tokens of the same request
        for id_, token in zip(event.received, event.tokens, strict=False):
            row = self._requests[id_]._row
            if table.tokens is not None:
                table.tokens[row, table.known[row] + earlier[id_]] = token
            earlier[id_] += 1
        accepted = np.array([max(counts[request.id] - 1, 0) for request in step.requests])
        absorbed = self._state.absorb(step, None, record.received_at, accepted)
        self._record.steps.append(record)
        for request in absorbed.finished:
            if request.id in event.stopped:  # perhaps at its limit
                request.finish_reason = FinishReason.STOP
        if len(absorbed.places):
            self._tell(self._on_tokens, [step.requests[place] for place in absorbed.places.tolist()])
        self._tell(self._on_step, record)
        for request in absorbed.finished:
            self._tell(self._on_finish, request)

    def _cancel(self, request: Request, now: float) -> None:
        self._state.end(request, FinishReason.CANCELLED, now)
        self._tell(self._on_finish, request)
