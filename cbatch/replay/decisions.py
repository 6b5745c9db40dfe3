"""Records the views that a policy saw, the plans that it made and the steps that ended, while an engine runs.

Together with its requests that is all that `cbatch.replay.replay` needs. Knows nothing of files.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from cbatch.engine import Engine
from cbatch.limits import Limits
from cbatch.plan import Plan
from cbatch.policy import Policy
from cbatch.record import StepRecord
from cbatch.request import FinishReason, Request
from cbatch.view import View

Ids = tuple[int, ...]


class Progress(NamedTuple):
    """A request at a view: its `num_computed`, `num_ready` and `num_tokens`, and the KV blocks that it holds."""

    id: int
    computed: int
    ready: int
    total: int
    held: int


class Seen(NamedTuple):
    """A copy of a view; times in seconds, KV in blocks.

    waiting, decoding: ids, in the order of the view. running: in admission order. preempted: those of `waiting` that ran before.
    """

    now: float
    num_in_flight: int
    num_places: int
    waiting: Ids
    running: tuple[Progress, ...]
    decoding: Ids
    preempted: tuple[Progress, ...]
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
    """A view and the plan made from it."""

    iteration: int
    seen: Seen
    decided: Decided


class StepEnd(NamedTuple):
    """The end of a step. received: ids of the requests that received a token. stopped: those that ended before their limit."""

    record: StepRecord
    received: Ids
    stopped: Ids


class Recorded(NamedTuple):
    """What a run's decisions depend on, except its requests. num_blocks, block_size: of the KV cache. events: in order."""

    limits: Limits
    num_blocks: int
    block_size: int
    events: Sequence[Decision | StepEnd] = ()


Sink = Callable[[Decision | StepEnd], None]


def look(view: View) -> Seen:
    """Returns a copy of the view."""
    return Seen(
        now=view.now,
        num_in_flight=view.num_in_flight,
        num_places=view.num_places,
        waiting=tuple(request.id for request in view.waiting),
        running=tuple(_progress(request, view) for request in view.running),
        decoding=tuple(request.id for request in view.decoding),
        preempted=tuple(_progress(request, view) for request in view.waiting if request.num_preemptions),
        num_free=view.kv.num_free,
        num_retiring=view.kv.num_retiring,
    )


def _progress(request: Request, view: View) -> Progress:
    counters = request.num_computed, request.num_ready, request.num_tokens
    return Progress(request.id, *counters, view.kv.num_held(request))


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
def record_decisions(engine: Engine, sink: Sink) -> Iterator[None]:
    """Sends each plan and the end of each step of an engine that has not begun to `sink`. Copies every view."""
    policy = engine.policy
    engine.policy = recorded = RecordedPolicy(policy, engine, sink)
    try:
        yield
    finally:
        engine.policy = policy
        recorded.send_ends()


class RecordedPolicy:
    """Records a policy's plans, illegal ones too, and the steps that end between them; passes everything else on."""

    def __init__(self, inner: Policy, engine: Engine, sink: Sink) -> None:
        self.inner = inner
        self._record, self._sink = engine.record, sink
        self._planned: dict[int, list[Request]] = {}  # the requests of each iteration that has not ended
        self._num_ended = 0

    def plan(self, view: View) -> Plan:
        self.send_ends()
        seen, iteration = look(view), view.iteration
        plan = self.inner.plan(view)
        if isinstance(plan, Plan):
            self._planned[iteration] = [*plan.requests]
            self._sink(Decision(iteration, seen, read(plan)))
        return plan

    def send_ends(self) -> None:
        """Sends the steps that have ended since the last call."""
        steps = self._record.steps
        begin = len(steps) - (steps[-1].iteration + 1 - self._num_ended if steps else 0)
        for step, receivers in zip(steps[begin:], self._record.receivers[begin:], strict=True):
            self._num_ended = step.iteration + 1
            stopped = (
                request.id
                for request in self._planned.pop(step.iteration)
                if request.finish_reason is FinishReason.STOP and request.finished_at == step.received_at
            )
            self._sink(StepEnd(step, tuple(receivers.tolist()), tuple(stopped)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
