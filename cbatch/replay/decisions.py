"""Records a policy's views and plans, and the ended steps, while an engine runs. Knows nothing about files.

`cbatch.replay.replay` reads these records and the requests of the run.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from cbatch.engine import Engine
from cbatch.limits import Limits
from cbatch.plan import Plan
from cbatch.policy import Policy
from cbatch.record import StepRecord
from cbatch.request import FinishReason, Request, Status
from cbatch.view import View

Ids = tuple[int, ...]


class Progress(NamedTuple):
    """A request in a view: its `num_computed`, `num_ready` and `num_tokens`, and the KV blocks that it holds."""

    id: int
    computed: int
    ready: int
    total: int
    held: int


class Seen(NamedTuple):
    """A copy of a view; times in seconds, KV in blocks.

    waiting, decoding: ids, in the order of the view. running: in admission order. preempted: waiting requests that ran before.
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
    """A copy of a `Plan` with ids in place of requests.

    entries, reserve: (id, tokens). reject: (id, reason). give_up: (session, whether to host memory).
    """

    entries: tuple[tuple[int, int], ...]
    preempt: Ids = ()
    reject: tuple[tuple[int, str], ...] = ()
    reserve: tuple[tuple[int, int], ...] = ()
    pad_to: int | None = None
    wake_at: float | None = None
    note: str = ""
    give_up: tuple[tuple[str, bool], ...] = ()

    def __str__(self) -> str:
        """Returns text such as `0:64 1:1 -2 !3`: minus marks preempted requests, an exclamation mark rejected requests."""
        words = [f"{id_}:{count}" for id_, count in self.entries]
        words += [f"-{id_}" for id_ in self.preempt]
        words += [f"!{id_}" for id_, _ in self.reject]
        if self.pad_to is not None:
            words.append(f"padded to {self.pad_to}")
        return " ".join(words) or "nothing"


class Decision(NamedTuple):
    """A view and its plan.

    cached: (id, tokens) that the plan's newcomers find in the prefix cache, if there is one.
    submitted: ids reported to the eviction's `on_submit` since the previous decision. cleared: whether the cache was emptied since then,
        as the replica has started again.
    """

    iteration: int
    seen: Seen
    decided: Decided
    cached: tuple[tuple[int, int], ...] = ()
    submitted: Ids = ()
    cleared: bool = False


class StepEnd(NamedTuple):
    """The end of a step.

    received: ids of the requests that received a token, once for each token. stopped: ids of requests that ended before their limit.
    tokens: the received tokens; empty unless a prefix cache names blocks by their tokens.
    """

    record: StepRecord
    received: Ids
    stopped: Ids
    tokens: Ids = ()


class Recorded(NamedTuple):
    """The facts on which a run's decisions depend, except its requests.

    events: in order. prefix_cache: whether blocks outlive requests. token_values: whether blocks are named by their tokens.
    iterations: see `Arrivals`. real_tokens: whether the drafter may find fewer drafts than asked for, as inside vLLM. num_ahead: see `KVView`.
    """

    limits: Limits
    num_blocks: int
    block_size: int
    events: Sequence[Decision | StepEnd] = ()
    prefix_cache: bool = False
    token_values: bool = False
    iterations: Mapping[int, int] = {}
    num_host_blocks: int = 0
    real_tokens: bool = False
    num_ahead: int = 0

    @classmethod
    def of(cls, engine: Engine, events: Sequence[Decision | StepEnd] = ()) -> "Recorded":
        pool, cached = engine.state.pool, engine.state.cache is not None
        values = cached and engine.state.table.tokens is not None
        host = engine.state.cache.pool.host.num_slots if engine.state.cache is not None else 0
        size = pool.num_blocks, pool.block_size
        return cls(engine.limits, *size, events, cached, values, engine.arrivals.iterations, host)


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
        give_up=tuple(plan.give_up.items()),
    )


def cached_tokens(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Returns the ids of the waiting requests in a plan, with their tokens in the prefix cache."""
    waiting = [request for request in plan.requests if request.status is Status.WAITING]
    return tuple((request.id, request.num_computed) for request in waiting)


@contextmanager
def record_decisions(
    engine: Engine, sink: Sink, arrived: Callable[[Request], object] = lambda request: None
) -> Iterator[None]:
    """Sends each plan and each step's end to `sink`, with a copy of every view. The engine must not have started.

    arrived: called with each request that arrives, before a policy sees the request; if the request ends before that, at its end.
    """
    policy, hook, missed = engine.policy, engine.on_arrival, engine.on_missed

    def on_arrival(request: Request) -> None:
        arrived(request)
        hook(request)

    engine.policy = recorded = RecordedPolicy(policy, engine, sink)
    engine.on_arrival, engine.on_missed = on_arrival, arrived
    try:
        yield
    finally:
        engine.policy, engine.on_arrival, engine.on_missed = policy, hook, missed
        recorded.send_ends()


class RecordedPolicy:
    """Wraps a policy; records its plans, including illegal plans, and the steps that end in between."""

    def __init__(self, inner: Policy, engine: Engine, sink: Sink) -> None:
        self.inner = inner
        self._record, self._sink, self._state = engine.record, sink, engine.state
        self._what = Recorded.of(engine)
        self._planned: dict[int, list[Request]] = {}  # requests of each unfinished iteration
        self._num_ended = self._num_submitted = self._num_cleared = 0
        self._num_received = Counter[int]()

    def plan(self, view: View) -> Plan:
        self.send_ends()
        seen, iteration = look(view), view.iteration
        plan = self.inner.plan(view)
        if isinstance(plan, Plan):
            self._planned[iteration] = [*plan.requests]
            self._sink(Decision(iteration, seen, read(plan), *self._of_cache(plan)))
        return plan

    def _of_cache(self, plan: Plan) -> tuple[tuple[tuple[int, int], ...], Ids, bool]:
        if (cache := self._state.cache) is None:
            return (), (), False
        submitted = tuple(cache.submitted[self._num_submitted :])
        self._num_submitted += len(submitted)
        before, self._num_cleared = self._num_cleared, cache.pool.num_cleared
        return cached_tokens(plan), submitted, before < self._num_cleared

    def send_ends(self) -> None:
        """Sends the steps that have ended since the last call."""
        steps = self._record.steps
        begin = len(steps) - (steps[-1].iteration + 1 - self._num_ended if steps else 0)
        for step, receivers in zip(steps[begin:], self._record.receivers[begin:], strict=True):
            self._num_ended = step.iteration + 1
            planned = {request.id: request for request in self._planned.pop(step.iteration)}
            ended = [request for request in planned.values() if request.finished_at == step.received_at]
            stopped = (request.id for request in ended if request.finish_reason is FinishReason.STOP)
            received = tuple(receivers.tolist())
            tokens = (self._next_token(planned[id_]) for id_ in received) if self._what.token_values else ()
            self._sink(StepEnd(step, received, tuple(stopped), tuple(tokens)))

    def _next_token(self, request: Request) -> int:
        """Returns the first token of a request that was not yet returned."""
        place = self._num_received[request.id]
        self._num_received[request.id] += 1
        if request._table is None:
            return request.output[place]
        assert self._state.table.tokens is not None
        return self._state.table.tokens.item(request._row, request.num_prompt_tokens + place)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
