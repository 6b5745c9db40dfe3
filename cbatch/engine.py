"""The serving loop: plan, launch, wait, absorb - and the asynchronous form that plans while the device computes.

    sync     host    | plan 0 |          | absorb 0, plan 1 |          | absorb 1 ...
             device           | compute 0 |                 | compute 1 |

    async    host    | plan 0 | plan 1 | wait 0 | absorb 0, plan 2 | wait 1 | absorb 1, plan 3 ...
             device           | compute 0       | compute 1               | compute 2 ...

In the asynchronous form iteration 1 is planned from predicted counters, before the tokens of iteration 0 exist. The device
carries these tokens over. The host blocks in one place: `executor.wait`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, cast

from cbatch.arrivals import Arrivals, Departures, Submitted, check_fits, not_submitted
from cbatch.calls import call
from cbatch.cost import CostModel
from cbatch.executor import Executor, Turn
from cbatch.kv import BlockPool, CountingPool, Eviction, PrefixPool
from cbatch.leap import entered, foresee
from cbatch.limits import Limits
from cbatch.plan import Plan
from cbatch.plan_check import check_plan
from cbatch.policy import HOOKS, Policy, check_policy, ignore, is_steady, optional_method
from cbatch.record import InFlight, RunRecord
from cbatch.request import FinishReason, Request, Status
from cbatch.request_table import RequestTable
from cbatch.stall import PATIENCE, Patience, StallWatch, standstill
from cbatch.state import State
from cbatch.view import EngineView


class Engine:
    """Serves requests with one policy on one executor.

    arrivals: the requests to serve: those that are submitted, unless the owner sets others before the run.
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
    ) -> None:
        """
        Args:
            num_blocks, block_size: size of the KV cache, and tokens per block.
            asynchronous: keep `executor.num_stages` iterations in flight while another one is planned; else one fewer.
            prefix_cache: the eviction of the prefix cache; None: no prefix cache.
        """
        self.policy, self.policy_name = policy, type(policy).__name__
        self.executor, self.limits = executor, limits
        check_policy(policy, limits)
        rows = limits.max_running + limits.max_batch
        table = RequestTable(rows, executor.num_stages, limits.max_request_tokens if executor.needs_tokens else None)
        size = (num_blocks, block_size, rows, limits.max_request_tokens)
        kind = BlockPool if executor.needs_tokens else CountingPool
        self.state = State(table, kind(*size) if prefix_cache is None else PrefixPool(*size, prefix_cache))
        self.record = RunRecord()
        self._in_flight: deque[InFlight] = deque()
        self.view = EngineView(self.state, limits, cost, self._in_flight, self.record)
        self.arrivals: Arrivals = Submitted(getattr(executor, "server_seconds", 0.0))
        self._departures, self._stall_watch = Departures(), StallWatch(patience)
        self._latest: InFlight | None = None  # the latest turn's iteration, if its plan is of decodes alone
        self._num_preempted = 0  # since the last launch; a plan may preempt and compute nothing
        self._depth = executor.num_stages if asynchronous else executor.num_stages - 1
        self._timed: Callable[[Any], Any] = getattr(executor, "timed", lambda plan: plan)
        self._until = inf  # seconds; further requests may be submitted then
        hooks = (optional_method(policy, name) for name in (*HOOKS, "num_at_once"))
        self._on_arrival, self._on_tokens, self._on_step, self._on_finish, self._num_at_once = hooks

    @property
    def engines(self) -> list["Engine"]:
        """This engine; a `cluster.Cluster` has several."""
        return [self]

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests for their arrival times; raises WorkloadError as `check_fits` and `note_id`."""
        assert isinstance(self.arrivals, Submitted), "an engine with other arrivals gets its requests from them"
        new = list(requests)
        for request in new:
            self.check_fits(request)
        self.arrivals.add(new)
        if self.state.cache is not None:
            self.state.cache.expect(new)

    def cancel(self, request: Request) -> None:
        """Ends a request whose client has left, between two turns. A request that has ended stays as it is.

        Raises WorkloadError if the request was not submitted to this engine.
        """
        if request.status is Status.FINISHED:
            return
        if pending := request.status is Status.PENDING:
            self.arrivals.withdraw(request)
        elif not self.state.holds(request):
            raise not_submitted(request)
        self._latest = None  # the plan is not repeated
        self.state.end(request, FinishReason.CANCELLED, self.executor.now())
        self._ended(request, known=not pending)

    @property
    def num_unfinished(self) -> int:
        """Known requests that have not ended, arrived or not."""
        return self.arrivals.num_unfinished

    def run(self, on_step: Callable[["Engine"], None] = lambda engine: None) -> RunRecord:
        """Serves until every request has ended. `on_step`, for progress bars, is called after each turn or leap."""
        turn = self._turn()
        while self.arrivals.num_unfinished or self._in_flight:
            turn()
            on_step(self)
        assert self.state.pool.num_used == 0, "every KV block is free when nothing runs"
        return self.record

    def run_until(self, time: float) -> None:
        """Serves until `time`, when more requests may be submitted, or until every request has ended."""
        self._until, turn = time, self._turn()
        while self.arrivals.num_unfinished and self.executor.now() < time:
            turn()
        self._until = inf

    def _turn(self) -> Callable[[], None]:
        """Returns `_leap_or_step` if the policy may be steady and nothing observes single tokens, else `step`."""
        unseen = self._on_tokens is ignore and getattr(self.executor, "repeats", False)
        return self._leap_or_step if unseen and "steady" in vars(type(self.policy)) else self.step

    def step(self) -> None:
        """One turn of the loop."""
        return self.step_async() if self._depth else self.step_sync()

    def step_sync(self) -> None:
        """Plans an iteration, computes it and absorbs its tokens."""
        if launched := self._launch_next():
            self._complete(launched)

    def step_async(self) -> None:
        """Plans and launches iteration N while N-1 is computed, then absorbs the tokens of N-1."""
        if launched := self._launch_next():
            self._in_flight.append(launched)
        if len(self._in_flight) > self._depth or (self._in_flight and not launched):
            self._complete(self._in_flight.popleft())

    def _launch_next(self) -> InFlight | None:
        """Plans the next iteration and hands it to the device. Returns None if the policy plans nothing."""
        planned_at = self._take_arrivals()
        plan = call(self._where, self._timed(self.policy.plan), self.view)
        self._latest = None
        checked = check_plan(plan, self.state, self.view, self.policy_name)
        for request in plan.preempt:
            self.state.preempt(request)
        self._num_preempted += len(plan.preempt)
        for request, why in plan.reject:
            self.state.end(request, FinishReason.REJECTED, planned_at, why)
            self._ended(request)
        if not plan.requests:
            if not self._in_flight and not plan.preempt and not plan.reject:
                self._idle(plan)
            return None
        self._stall_watch.note_launch()
        state = self.state
        step = state.apply(checked, planned_at)
        counts = (self._num_preempted, state.pool.num_used, len(state.waiting), len(state.running))
        self._num_preempted = 0
        launched = InFlight(step, self.executor.launch(step), (planned_at, self.executor.now()), counts)
        if step.num_batch_tokens == step.num_decode_tokens and not plan.preempt and not plan.reject:
            self._latest = launched
        return launched

    def _leap_or_step(self) -> None:
        """Takes the turns that repeat the latest turn; if there are none, takes one turn."""
        latest, executor = self._latest, cast(Any, self.executor)
        change = self._next_change() if latest else -inf
        if latest is None or executor.now() >= change or not self._call(is_steady, self.policy):
            return self.step()
        if not (foreseen := self.foresee()):
            return self.step()
        turns: list[Turn] = []
        try:
            in_flight = latest.handle if self._depth else None
            turns.extend(executor.repeat(latest.step, len(foreseen), change, in_flight))
        finally:  # it may fail
            if turns:
                num_computed = executor.graph_tokens(latest.step.shape()) or latest.step.pad_to
                self._repeated(latest, foreseen, turns, num_computed)

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
        if self._on_step is not ignore:
            for step in steps:
                self._call(self._on_step, step)

    def foresee(self, *, ends: bool = False) -> list[int]:
        """Returns the KV blocks in use after each of the next iterations for which a steady policy repeats the latest plan.

        ends: include the iteration after which a request has ended, which cannot be leapt over.
        """
        return foresee(self._latest, self.state, self._depth, ends) if len(self._in_flight) == self._depth else []

    def _complete(self, launched: InFlight) -> None:
        """Waits for the oldest step in flight and absorbs its tokens."""
        step, waited_at = launched.step, self.executor.now()
        result = self.executor.wait(launched.handle)
        received_at = self.executor.now()
        absorbed = self.state.absorb(step, result.tokens, received_at)
        record = self.record.add(launched, result, waited_at, received_at, self.executor.now(), absorbed.receivers)
        if self._on_tokens is not ignore and len(absorbed.receivers):
            self._call(self._on_tokens, [step.requests[place] for place in absorbed.places.tolist()])
        if self._on_step is not ignore:
            self._call(self._on_step, record)
        for request in absorbed.finished:
            self._ended(request)
        if len(absorbed.receivers):
            self._stall_watch.note_progress(received_at)
        else:
            self._stall_watch.check(received_at, self.view, self._where)

    def _take_arrivals(self) -> float:
        """Queues requests that have arrived, and cancels requests whose clients have left; returns the time."""
        now = self.executor.now()
        vars(self.view)["now"] = now  # as `view.update`, in a tenth of its time
        if self.arrivals.next() <= now:
            for request in self.arrivals.due(now, self.state.iteration):
                self._arrive(request, now)
        if self._departures.next_at <= now:
            for request in self._departures.due(now):
                self.cancel(request)
        return now

    def _next_change(self) -> float:
        """When the next request arrives or is cancelled."""
        return min(self.arrivals.next(), self._departures.next_at, self._until)

    def _arrive(self, request: Request, now: float) -> None:
        request.arrive(now)
        if self.state.cache is not None:
            self.state.cache.expect([request])
        self.state.waiting.add(request)
        self._departures.arrived(request)
        self._call(self._on_arrival, request)

    def _idle(self, plan: Plan) -> None:
        """Sleeps until the next arrival, cancellation or the plan's `wake_at`: nothing is in flight and the plan is empty."""
        state, now = self.state, self.view.now
        change, wake_at = self._next_change(), inf
        if plan.wake_at is not None and plan.wake_at > now and (state.waiting or state.running):
            self._stall_watch.note_empty_plan()
            self._stall_watch.check(now, self.view, self._where)
            wake_at = plan.wake_at
        if (time := min(change, wake_at)) < inf:
            self.arrivals.wait(self.executor, time)
            if not (state.waiting or state.running) or self._next_change() <= self.executor.now():
                self._stall_watch.note_progress(now := self.executor.now())
                for request in self.arrivals.due(now, None):
                    self._arrive(request, now)
        elif self.num_unfinished:
            raise standstill(self._where(), self.view, plan, self.num_unfinished)

    def _ended(self, request: Request, known: bool = True) -> None:
        """Reports the end of a request. known: the policy knows of the request's arrival."""
        self.arrivals.ended(request)
        self._departures.ended(request)
        self.record.requests.append(request)
        if known:
            self._call(self._on_finish, request)

    def _call(self, method: Callable[[Any], Any], argument: Any) -> Any:
        """Calls a method of the policy; an exception in it becomes an error that names the policy."""
        return call(self._where, method, argument)

    def _where(self) -> str:
        return f"policy {self.policy_name}, iteration {self.state.iteration}"

    def check_fits(self, request: Request) -> None:
        """Raises WorkloadError for a request that cannot be served, or was submitted before."""
        num_at_once = self._call(self._num_at_once, request) or 1
        check_fits(request, self.limits, self.state.pool.num_tokens, self.policy_name, num_at_once)
        if self.state.cache is not None:
            self.state.cache.check(request)
