"""A policy's view of the host that serves its requests.

`View`, and `KVView` in `kv.view`, are abstract. `EngineView` and `EngineKVView` implement them on the state of our engine,
`cbatch.vllm` on the state of vLLM's scheduler.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.cost import CostModel
from cbatch.drafts import rows_of
from cbatch.kv import BlockHash, Freed, KVView
from cbatch.limits import Limits, Resources
from cbatch.plan_builder import PlanBuilder
from cbatch.record import InFlight, RunRecord, StepRecord
from cbatch.request import WAITING, Ints, Request, Requests, read_only
from cbatch.state import State


class View(Resources):
    """A policy's view of the host's current state, live and read-only. Hosts change attributes with `update`.

    now: seconds since the start of the run.
    limits, kv, running, decoding, drafts: see `Resources`. cost: predicts the seconds of an iteration from its shape.
    waiting: arrived requests that do not run, in arrival order, including preempted requests. Those that moved here may hold KV blocks.
    prefilling: requests of `running` with prompt tokens (after a preemption, prompt or output tokens) left.
    """

    now: float
    cost: CostModel
    waiting: Sequence[Request]
    prefilling: Requests

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"view.{name} cannot be assigned; a policy changes its own state only")
        super().__setattr__(name, value)

    def update(self, **attributes: Any) -> None:
        """Sets attributes. For hosts only."""
        vars(self).update(attributes)

    @property
    @abstractmethod
    def iteration(self) -> int:
        """Returns the number of the iteration being planned."""

    @property
    @abstractmethod
    def num_in_flight(self) -> int:
        """Returns the number of launched iterations that have not ended."""

    @property
    @abstractmethod
    def predicted_end(self) -> float:
        """Returns when `cost` predicts the iterations in flight to have ended, in seconds; `now` if there are none."""

    @abstractmethod
    def is_in_flight(self, request: Request) -> bool:
        """Returns whether an iteration in flight computes tokens of this request."""

    def plan(self) -> PlanBuilder:
        """Returns a builder with an empty plan for this iteration."""
        return PlanBuilder(self)


class EngineKVView(KVView):
    block_size: int = read_only("_pool.block_size")
    num_blocks: int = read_only("_pool.num_blocks")
    num_free: int = read_only("_pool.num_free")
    num_retiring: int = read_only("_pool.num_retiring")

    def __init__(self, state: State) -> None:
        self._state = state
        self._pool = state.pool
        self._cursor: int | None = None  # of the policy, in the changes of the prefix cache

    @property
    def num_cached(self) -> int:  # type: ignore[override]
        return 0 if self._state.cache is None else self._state.cache.pool.num_cached

    def num_held(self, request: Request) -> int:
        return self._pool.held_by(request._row) if request._table is not None and request.status is not WAITING else 0

    def freed_by_preempting(self, request: Request) -> Freed:
        number = self._pool.num_alone(request._row) if request._table is not None else 0
        return Freed(number, 0) if self._state.in_flight_until(request) is None else Freed(0, number)

    def num_shared(self, request: Request) -> int:
        cache = self._state.cache
        return 0 if cache is None or request.status is not WAITING else cache.num_shared(request)

    def block_hashes(self, request: Request, at_most: int | None = None) -> Sequence[BlockHash]:
        cache = self._state.cache
        return () if cache is None or request.status is not WAITING else cache.hashes(request, at_most)

    def changed_hashes(self) -> Sequence[BlockHash] | None:
        if self._state.cache is None:
            return ()
        changes, cursor = self._state.cache.pool.changes, self._cursor
        self._cursor = changes.begin()
        return () if cursor is None else changes.since(cursor)

    def num_gained(self, preempted: Iterable[Request], newcomers: Iterable[Request]) -> int:
        new = list(newcomers)
        num_found = sum(request.num_computed for request in new) // self.block_size
        return self._state.num_gained(preempted, new) + num_found - sum(map(self.num_shared, new))


class EngineView(View):
    iteration: int = read_only("_state.iteration")

    def __init__(
        self, state: State, limits: Limits, cost: CostModel, in_flight: Iterable[InFlight], record: RunRecord
    ) -> None:
        """in_flight: iterations in flight, oldest first. record: ended iterations."""
        self.update(now=0.0, limits=limits, kv=EngineKVView(state), cost=cost, waiting=state.waiting)
        self.update(running=state.running, decoding=state.decoding, prefilling=state.prefilling, drafts=state.drafts)
        self._state = state
        self._in_flight, self._record = in_flight, record

    @property
    def num_in_flight(self) -> int:
        return self._state.iteration - self._state.num_ended

    @property
    def predicted_end(self) -> float:
        last = self._record.steps[-1] if self._record.steps else None
        launched = ((step.seconds(self.cost), launched_at) for step, _, (_, launched_at), _ in self._in_flight)
        return max(predict_end(last, launched, self.limits.num_stages), self.now)

    def is_in_flight(self, request: Request) -> bool:
        return self._state.in_flight_until(request) is not None

    def ready_decodes(self, at_most: int, without: Set[Request] = frozenset()) -> tuple[list[Request], int]:
        requests, rows = self._ready_decodes()
        if without:
            others = [request not in without for request in requests]
            rows, requests = rows[others], list(compress(requests, others))
        if len(rows) > at_most:
            rows, requests = rows[:at_most], requests[:at_most]
        return requests, len(self._lack_a_block(rows).nonzero()[0])

    def num_lacking(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> int:
        rows, pool = rows_of(requests), self._state.pool
        return sum(pool.lacking(pool.room[rows], self._state.table.computed[rows] + num_tokens)[1])

    def decode_blocks(self) -> Mapping[Request, int]:
        requests, rows = self._ready_decodes()
        return dict(zip(requests, self._lack_a_block(rows).tolist(), strict=True))

    def _ready_decodes(self) -> tuple[list[Request], Ints]:
        """Returns the decodes with a ready token, and their rows. Callers must not modify either."""
        requests, rows = self._state.decoding.members, self._state.decoding.rows
        if self.limits.num_stages > 1 or self._state.table.num_drafting:  # some tokens are not known yet
            ready = self._state.table.ready(rows) > 0
            rows, requests = rows[ready], list(compress(requests, ready.tolist()))
        return requests, rows

    def _lack_a_block(self, rows: Ints) -> NDArray[np.bool_]:
        """Returns whether the next token of each row needs a block."""
        return self._state.table.computed[rows] >= self._state.pool.room[rows]


def predict_end(last: StepRecord | None, launched: Iterable[tuple[float, float]], num_stages: int) -> float:
    """Returns when the iterations in flight will have ended, in seconds.

    last: the latest ended iteration. launched: seconds in the busiest stage and time of launch, per iteration in flight.
    """
    free_at = end = 0.0  # when the first stage is free, and when the last iteration has ended
    if last is not None:
        free_at, end = last.started + (last.ended - last.started) / num_stages, last.ended
    for seconds, launched_at in launched:
        start = max(free_at, launched_at)
        free_at, end = start + seconds, max(start + num_stages * seconds, end + seconds)
    return end
