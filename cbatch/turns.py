"""The turns of an engine: plan, launch, wait, absorb - and the asynchronous form that plans while the device computes.

    sync     host    | plan 0 |          | absorb 0, plan 1 |          | absorb 1 ...
             device           | compute 0 |                 | compute 1 |

    async    host    | plan 0 | plan 1 | wait 0 | absorb 0, plan 2 | wait 1 | absorb 1, plan 3 ...
             device           | compute 0       | compute 1               | compute 2 ...

Asynchronously, iteration 1 is planned from predicted counters before the tokens of iteration 0 exist; the device carries them over.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, cast

from cbatch.arrivals import Arrivals, Listed, not_submitted
from cbatch.cost import CostModel
from cbatch.drafts import TableDrafts, drafter_of
from cbatch.errors import call
from cbatch.executor import Executor, Turn
from cbatch.host import Observer
from cbatch.inbox import Inbox
from cbatch.kv import Eviction
from cbatch.kv.cache import make_pool
from cbatch.leap import entered, foresee
from cbatch.limits import Limits
from cbatch.moves import end_leases
from cbatch.plan import Plan
from cbatch.plan_check import check_plan
from cbatch.policy import HOOKS, Policy, check_policy, ignore, is_steady, name_of, optional_method, tokens_at_once
from cbatch.record import InFlight, RunRecord
from cbatch.request import FinishReason, Request, Status
from cbatch.request_table import RequestTable
from cbatch.stall import PATIENCE, Patience, StallWatch
from cbatch.state import State
from cbatch.view import EngineView
from cbatch.waiting import Waiting


class Turns:
    """Takes turns with one policy on one executor. Knows nothing of loops.

    arrivals: the requests to serve; an engine's own. leaps: whether a turn may be a leap over many. on_arrival: the policy's hook, which a recorder may wrap.
    on_missed: called with a request that ends before its arrival is announced to the policy.
    inbox: requests that other engines hand to this one. on_leave: called with a request that another engine continues (`State.hands_over`). on_launch: with each step that begins. on_absorbed: with each ended one.
    """

    def __init__(
        self,
        policy: Policy,
        executor: Executor,
        limits: Limits,
        cost: CostModel,
        *,
        num_blocks: int,
        block_size: int,
        asynchronous: bool = True,
        patience: Patience = PATIENCE,
        prefix_cache: Eviction | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        """num_blocks, block_size, num_host_blocks: see `KVSize`.

        asynchronous: keep `executor.num_stages` iterations in flight while another one is planned; else one fewer.
        prefix_cache: the eviction of the prefix cache; None: no prefix cache.
        """
        self.policy, self.policy_name, self.executor, self.limits = policy, name_of(policy), executor, limits
        check_policy(policy, limits)
        size = num_blocks, block_size, limits.max_running + limits.max_batch, limits.max_request_tokens
        table = RequestTable(size[2], executor.num_stages, size[3] if executor.needs_tokens else None)
        self.state = State(table, make_pool(size, executor.needs_tokens, prefix_cache, num_host_blocks))
        if limits.max_drafts:
            self.state.drafts = TableDrafts(table, self.state.decoding, limits.max_drafts, drafter_of(executor))
        self.record, self._in_flight = RunRecord(), deque[InFlight]()
        self.view = EngineView(self.state, limits, cost, self._in_flight, self.record)
        self.arrivals: Arrivals = Listed()
        self.arrivals.server_seconds = getattr(executor, "server_seconds", 0.0)
        self._waiting, self._stall_watch = Waiting(executor, self._in_flight), StallWatch(patience)
        self._latest: InFlight | None = None  # the latest turn's iteration, if its plan is of decodes alone
        self._renewal = inf, 0  # seconds from which, and free blocks below which this plan is not repeated
        self._num_preempted, self._depth = 0, executor.num_stages - (not asynchronous)  # preempted since a launch
        self._timed: Callable[[Any], Any] = getattr(executor, "timed", lambda plan: plan)
        self._ended: list[Request] = []  # and not returned by a turn yet
        self.leaps, self._empty_plan, self.inbox = True, Plan(), Inbox()
        self.seconds_copying = 0.0  # for which iterations waited for copies of KV blocks
        self.observer: Observer | None = None  # of a cluster
        self.on_leave = self.on_launch = self.on_absorbed = self.on_missed = cast(Callable[[Any], object], ignore)
        hooks = (*(optional_method(policy, name) for name in HOOKS), tokens_at_once(policy))
        self.on_arrival, self._on_wait, self._on_tokens, self._on_step, self._on_finish, self._num_at_once = hooks
        repeats, steady = getattr(executor, "repeats", False), "steady" in vars(type(policy))
        self._may_leap = repeats and steady and self._on_tokens is ignore

    def cancel(self, request: Request, reason: FinishReason = FinishReason.CANCELLED, why: str = "") -> None:
        """Ends a request whose client has left, or that a router has rejected, between two turns. A request that has ended stays as it is.

        Raises WorkloadError if the request was not submitted to this engine.
        """
        if request.status is Status.FINISHED:
            return
        pending, moving = request.status is Status.PENDING, request.status is Status.MOVING
        if not (self.inbox.withdraw(request) if moving else pending or self.state.holds(request)):
            raise not_submitted(request)
        if pending and request in self._waiting.arrived:
            self._waiting.arrived.remove(request)
        elif pending:
            self.arrivals.withdraw(request)
        self._latest = None
        self._waiting.wake()  # a new plan is due
        self.state.end(request, reason, self.executor.now(), why)
        self._end(request, known=not (pending or moving))

    def turn(self, until: float) -> Sequence[Request]:
        waiting, executor = self._waiting, self.executor
        if (ready_at := executor.ready_at()) > executor.now():
            executor.sleep_until(ready_at)
        if waiting.asleep:
            waiting.sleep_until(waiting.next_at())
        if not (self._may_leap and self.leaps) or waiting.arrived or self.inbox.awaits_room or not self._leap(until):
            self._step(until)
            if self.observer is not None:
                self.observer.changed(self.executor.now(), self.state.pool.num_used)
        ended, self._ended = self._ended, []
        return ended

    def _step(self, until: float) -> None:
        """Plans and launches an iteration, and completes the oldest one in flight if there are more than may stay in flight.

        After an empty plan the oldest iteration is waited for, in a pipeline with idle stages only until a request arrives.
        """
        in_flight, waiting = self._in_flight, self._waiting
        if waiting.asleep and waiting.is_for_oldest():
            self._complete(in_flight.popleft())
            return
        if launched := self._launch_next():
            in_flight.append(launched)
        if len(in_flight) > self._depth:
            self._complete(in_flight.popleft())
        elif in_flight and not launched:
            change = min(until, waiting.change_at)
            is_idle = len(in_flight) < self.limits.num_stages and self.executor.now() < change
            if is_idle and change < self.executor.ends_at(in_flight[0].handle):
                waiting.fall_asleep()
            else:
                self._complete(in_flight.popleft())

    def _launch_next(self) -> InFlight | None:
        """Plans the next iteration and hands it to the device. Returns None if the policy plans nothing."""
        planned_at, state = self._take_arrivals(), self.state
        self._waiting.wake()
        plan = call(self._where, self._timed(self.policy.plan), self.view)
        self._latest = None
        checked = check_plan(plan, state, self.view, self.policy_name)
        for request in plan.preempt:
            state.preempt(request)
            self._call(self._on_wait, request)
        self._num_preempted += len(plan.preempt)
        for request, why in plan.reject:
            state.end(request, FinishReason.REJECTED, planned_at, why)
            self._end(request)
        if plan.give_up and state.cache is not None:
            state.cache.give_up(plan.give_up)
        if not plan.requests:
            if not (self._in_flight or plan.preempt or plan.reject or self.inbox.give_way(state, planned_at)):
                self._idle(plan)
            return None
        self._stall_watch.note_launch()
        step = state.apply(checked, planned_at)
        counts = (self._num_preempted, state.pool.num_used, len(state.waiting), len(state.running))
        self._num_preempted = 0
        self.on_launch(step)
        launched = InFlight(step, self.executor.launch(step), (planned_at, self.executor.now()), counts)
        decodes_alone = step.num_batch_tokens == step.num_decode_tokens and checked.drafts is None
        if decodes_alone and not (plan.preempt or plan.reject):
            self._latest = launched
            self._renewal = inf if plan.wake_at is None else plan.wake_at, plan.least_free
        if self.observer is not None:
            self.observer.changed(launched.times[1], state.pool.num_used)
        return launched

    def _leap(self, until: float) -> bool:
        """Takes the turns before `until` that repeat the latest turn; returns False if there are none."""
        latest, executor = self._latest, cast(Any, self.executor)
        change = min(until, self._waiting.change_at, self._renewal[0])
        if latest is None or executor.now() >= change or not self._call(is_steady, self.policy):
            return False
        if not (foreseen := self.foresee()):
            return False
        turns: list[Turn] = []
        try:
            in_flight = latest.handle if self._depth else None
            turns.extend(executor.repeat(latest.step, len(foreseen), change, in_flight))
        finally:  # it may fail
            if turns:
                num_computed = executor.graph_tokens(latest.step.shape()) or latest.step.pad_to
                self._repeated(latest, foreseen, turns, num_computed)
        return True

    def _repeated(self, latest: InFlight, foreseen: Sequence[int], turns: Sequence[Turn], num_computed: int) -> None:
        """Enters turns that repeated the latest turn in the state and the record."""
        first, num_turns, received_at = latest.step, len(turns), turns[-1][-1]
        last, steps = entered(latest, foreseen, turns, num_computed, self._depth)
        self.record.steps += steps
        self.record.receivers += [self.state.table.id[first.rows]] * num_turns
        self.state.repeat(first, num_turns, received_at)
        self._latest = last._replace(state=(*last.state[:3], len(self.state.running)))
        if self._depth:
            self._in_flight[0] = self._latest
        self._stall_watch.note_progress(received_at)
        if self.observer is not None:
            *earlier, latest_change = ((turn[1], used) for turn, used in zip(turns, foreseen, strict=False))
            self.observer.changed(*latest_change, earlier)
        if self._on_step is not ignore:
            for step in steps:
                self._call(self._on_step, step)

    def foresee(self, *, ends: bool = False) -> list[int]:
        """Returns the KV blocks in use after each of the next iterations for which a steady policy repeats the latest plan.

        ends: include the iteration after which a request has ended, which cannot be leapt over.
        """
        if len(self._in_flight) != self._depth or self.executor.now() >= self._renewal[0]:
            return []
        return foresee(self._latest, self.state, self._depth, ends, self._renewal[1])

    def _complete(self, launched: InFlight) -> None:
        """Waits for the oldest step in flight and absorbs its tokens."""
        step, waited_at = launched.step, self._waiting.since
        self._waiting.wake()
        waited_at = self.executor.now() if waited_at is None else waited_at
        result = self.executor.wait(launched.handle)
        received_at = self.executor.now()
        self.seconds_copying += result.blocks.waited if result.blocks is not None else 0.0
        absorbed = self.state.absorb(step, result.tokens, received_at, result.accepted)
        record = self.record.add(launched, result, waited_at, received_at, self.executor.now(), absorbed.receivers)
        if self._on_tokens is not ignore and len(absorbed.receivers):
            self._call(self._on_tokens, [step.requests[place] for place in absorbed.places.tolist()])
        if self._on_step is not ignore:
            self._call(self._on_step, record)
        for request in absorbed.finished:
            self._end(request)
        self.on_absorbed(step)
        for request in absorbed.leaving:
            self.on_leave(request)
        if len(absorbed.receivers):
            self._stall_watch.note_progress(received_at)
        else:
            self._stall_watch.check(received_at, self.view, self._where)

    def _take_arrivals(self) -> float:
        """Queues requests that have arrived, and cancels requests whose clients have left; returns the time."""
        vars(self.view)["now"] = now = self.executor.now()  # as `view.update`, in a tenth of its time
        waiting, departures = self._waiting, self._waiting.departures
        if waiting.asleep and not self._in_flight and (waiting.arrived or waiting.change_at <= now):
            self._stall_watch.note_progress(now)
        arrived, waiting.arrived = waiting.arrived, []
        for request in arrived:
            request.arrive(now if request.id in self.arrivals.iterations else None)
            if self.state.cache is not None:
                self.state.cache.expect([request])
            self.state.waiting.add(request)
            departures.arrived(request)
            self._announce(request)
        for request in departures.due(now) if departures.next_at <= now else ():
            self.cancel(request)
        if waiting.poked_at <= now or self.inbox.awaits_room:
            waiting.poked_at = end_leases(self.state, now)
            for request in self.inbox.take(self.state, now):
                self._announce(request)
            waiting.poked_at = min(waiting.poked_at, self.inbox.next_at)
        return now

    def _announce(self, request: Request) -> None:
        self._call(self.on_arrival, request)
        self._call(self._on_wait, request)

    def _idle(self, plan: Plan) -> None:
        """Falls asleep until an arrival, a departure or the plan's `wake_at`: nothing is in flight and the plan is empty."""
        now, wake_at, self._empty_plan = self.view.now, inf, plan
        if plan.wake_at is not None and plan.wake_at > now and (self.state.waiting or self.state.running):
            self._stall_watch.note_empty_plan()
            self._stall_watch.check(now, self.view, self._where)
            wake_at = plan.wake_at
        self._waiting.fall_asleep(wake_at)

    def _end(self, request: Request, known: bool = True) -> None:
        """Reports the end of a request. known: the policy knows of the request's arrival."""
        self._ended.append(request)
        if self.observer is not None:
            self.observer.ended(request)
        self._waiting.departures.ended(request)
        self.record.requests.append(request)
        self._call(self._on_finish if known else self.on_missed, request)

    def _call(self, method: Callable[[Any], Any], argument: Any) -> Any:
        """Calls a method of the policy; an exception in it becomes an error that names the policy."""
        return call(self._where, method, argument)

    def _where(self) -> str:
        return f"policy {self.policy_name}, iteration {self.state.iteration}"
