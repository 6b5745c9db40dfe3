"""Records the views that a policy saw and the plans that it made, while an engine runs.

    engine ---- plan(view) ----> policy          each view and plan,
           ---- wait(step) ----> executor        each step's end,
           ---- now() ---------> clock           and each reading of the clock go to a sink, in this order

Together with its requests that determines a run: `counterfactual` replays it. Knows nothing of files.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from cbatch.engine import Engine
from cbatch.executor import Executor, Step, StepResult
from cbatch.plan import Plan
from cbatch.policy import Policy
from cbatch.view import View

Ids = tuple[int, ...]


class Seen(NamedTuple):
    """A copy of a view; times in seconds, KV in blocks.

    waiting: ids in arrival order. running: (id, tokens computed, tokens ready) in admission order.
    """

    now: float
    num_in_flight: int
    waiting: Ids
    running: tuple[tuple[int, int, int], ...]
    num_free: int
    num_retiring: int


class Decided(NamedTuple):
    """A copy of a `Plan`, by the ids of its requests.

    entries: (id, tokens). reject: (id, reason). reserve: (id, tokens).
    """

    entries: tuple[tuple[int, int], ...]
    preempt: Ids = ()
    reject: tuple[tuple[int, str], ...] = ()
    reserve: tuple[tuple[int, int], ...] = ()
    pad_to: int | None = None
    wake_at: float | None = None
    note: str = ""

    def __str__(self) -> str:
        """As in `0:64 1:1 -2 !3`: minus marks preempted requests, an exclamation mark rejected ones."""
        words = [f"{id_}:{count}" for id_, count in self.entries]
        words += [f"-{id_}" for id_ in self.preempt]
        words += [f"!{id_}" for id_, _ in self.reject]
        if self.pad_to is not None:
            words.append(f"padded to {self.pad_to}")
        return " ".join(words) or "nothing"


class Decision(NamedTuple):
    """One plan. times: the clock's readings since the previous event, the view's `now` included."""

    iteration: int
    seen: Seen
    decided: Decided
    times: tuple[float, ...]


class StepEnd(NamedTuple):
    """The end of a step. stopped: ids whose end-of-sequence token was sampled. times: as in `Decision`."""

    iteration: int
    started: float
    ended: float
    stopped: Ids
    times: tuple[float, ...]


Sink = Callable[[Decision | StepEnd], None]


def look(view: View) -> Seen:
    """Returns a copy of the view."""
    return Seen(
        now=view.now,
        num_in_flight=view.num_in_flight,
        waiting=tuple(request.id for request in view.waiting),
        running=tuple((request.id, request.num_computed, request.num_ready) for request in view.running),
        num_free=view.kv.num_free,
        num_retiring=view.kv.num_retiring,
    )


def read(plan: Plan) -> Decided:
    """Returns a copy of the plan."""
    return Decided(
        entries=tuple((request.id, int(count)) for request, count in plan),
        preempt=tuple(request.id for request in plan.preempt),
        reject=tuple((request.id, why) for request, why in plan.reject),
        reserve=tuple((request.id, int(tokens)) for request, tokens in plan.reserve.items()),
        pad_to=plan.pad_to,
        wake_at=plan.wake_at,
        note=plan.note,
    )


@contextmanager
def record_decisions(engine: Engine, sink: Sink) -> Iterator["RecordedExecutor"]:
    """Send each plan and step of an engine that has not begun to `sink`. Copies every view.

    Yields the executor that keeps the clock's readings since the last event.
    """
    policy, executor = engine.policy, engine.executor
    engine.executor = recorded = RecordedExecutor(executor, sink)
    engine.policy = RecordedPolicy(policy, recorded)
    try:
        yield recorded
    finally:
        engine.policy, engine.executor = policy, executor


class RecordedPolicy:
    """Records a policy's plans, illegal ones too; everything else is passed on."""

    def __init__(self, inner: Policy, executor: "RecordedExecutor") -> None:
        self.inner = inner
        self._executor = executor

    def plan(self, view: View) -> Plan:
        seen, iteration = look(view), view.iteration
        plan = self.inner.plan(view)
        if isinstance(plan, Plan):
            self._executor.sink(Decision(iteration, seen, read(plan), self._executor.take_times()))
        return plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class RecordedExecutor:
    """Records an executor's clock and step ends; everything else is passed on."""

    def __init__(self, inner: Executor, sink: Sink) -> None:
        self.inner, self.sink = inner, sink
        self.num_stages, self.needs_tokens = inner.num_stages, inner.needs_tokens
        self._times: list[float] = []

    def take_times(self) -> tuple[float, ...]:
        """Returns the clock's readings since the last call."""
        times, self._times = tuple(self._times), []
        return times

    def launch(self, step: Step) -> tuple[Step, Any]:
        return step, self.inner.launch(step)

    def wait(self, in_flight: tuple[Step, Any]) -> StepResult:
        step, handle = in_flight
        result = self.inner.wait(handle)
        self.sink(StepEnd(step.index, result.started, result.ended, _stopped(step, result), self.take_times()))
        return result

    def restart(self) -> None:
        self.inner.restart()

    def now(self) -> float:
        time = self.inner.now()
        self._times.append(time)
        return time

    def sleep_until(self, time: float) -> None:
        self.inner.sleep_until(time)

    def close(self) -> None:
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _stopped(step: Step, result: StepResult) -> Ids:
    """Returns the ids of the requests of which the step sampled a stop token."""
    if result.tokens is None:
        return ()
    places = step.sampled[step.table.can_stop[step.rows[step.sampled]]].tolist()
    sampled = ((step.requests[place], int(result.tokens[place])) for place in places)
    return tuple(request.id for request, token in sampled if token in request.stop_tokens)
