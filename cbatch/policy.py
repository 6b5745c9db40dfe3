"""The policy interface: what a scheduling policy sees, and what it answers.

    class Mine:
        def plan(self, view: View) -> Plan:
            plan = view.plan()
            plan.add_decodes()
            for request in view.waiting:
                if not plan.add(request):
                    break
            return plan.build()

is a whole policy: it runs with real tokens on a CPU or GPU and in simulation, sync and async, without an edit.
"""

from __future__ import annotations

from collections.abc import Collection, Reversible, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

from cbatch.cost import CostModel
from cbatch.errors import ConfigError
from cbatch.plan import Plan, PlanBuilder
from cbatch.request import Request
from cbatch.state import State


class Policy(Protocol):
    """Decides which requests compute how many tokens in the next iteration. No clock, no randomness, no I/O.

    A policy may also define any of

        check(limits: Limits) -> None            # before anything runs; raise ConfigError if its settings do not fit
        on_arrival(request: Request) -> None     # a request has come to wait
        on_step(record: StepRecord) -> None      # an iteration has ended
        on_finish(request: Request) -> None      # a request has ended

    The others may change the policy's own state only.
    """

    def plan(self, view: View) -> Plan:
        """Plan the next iteration.

        An empty plan means: wait for the next arrival or completion, or until `plan.wake_at`.
        """
        ...


class Requests(Collection[Request], Reversible[Request], Protocol):
    """An ordered, read-only set of requests that follows the engine's state."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an iteration may hold.

    max_batch: requests in one iteration; also, times `num_stages`, the most requests admitted at once.
    max_tokens: tokens in one iteration.
    max_request_tokens: prompt and output of one request (the model's positions).
    tile: tokens by which matrix products are tiled; a total that is a multiple wastes nothing. 1: unknown.
    graph_sizes: tokens of the mixed iterations to capture graphs for, ascending; empty: as the runtime chooses.
    num_stages: pipeline stages; a token sampled by iteration N can be fed to iteration N + num_stages.
    """

    max_batch: int
    max_tokens: int
    max_request_tokens: int
    tile: int = 128
    graph_sizes: tuple[int, ...] = ()
    num_stages: int = 1

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_tokens", "max_request_tokens", "tile", "num_stages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def max_running(self) -> int:
        """Requests that may be admitted at once."""
        return self.max_batch * self.num_stages


class KVView:
    """The KV cache as a policy sees it. Blocks that come free only when an iteration in flight ends count as taken."""

    def __init__(self, state: State) -> None:
        self._pool = state.pool

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_retiring(self) -> int:
        """Blocks that come free when the iterations in flight have ended."""
        return self._pool.num_retiring

    def blocks_for(self, num_tokens: int) -> int:
        return self._pool.blocks_for(num_tokens)

    def num_held(self, request: Request) -> int:
        """Blocks that a request holds."""
        return self._pool.held_by(request.row) if request.table is not None else 0


class View:
    """What a policy may look at: the engine's state as it is now, read-only and without copies.

    now: seconds since the start of the run.
    waiting: requests that have arrived and hold nothing, in arrival order; preempted ones are among them.
    running: admitted requests with tokens left to compute, in admission order.
    decoding: those of `running` that have only their newest token left to compute.
    prefilling: those of `running` with prompt tokens (after a preemption, prompt and output) left.
    kv, limits: capacity.
    cost: predicts the seconds of an iteration of a given shape.
    """

    def __init__(self, state: State, limits: Limits, cost: CostModel) -> None:
        self.now = 0.0
        self.limits = limits
        self.kv = KVView(state)
        self.cost = cost
        self.waiting: Sequence[Request] = state.waiting
        self.running: Requests = state.running
        self.decoding: Requests = state.decoding
        self.prefilling: Requests = state.prefilling
        self._state = state

    @property
    def iteration(self) -> int:
        """The number of the iteration being planned."""
        return self._state.iteration

    @property
    def num_in_flight(self) -> int:
        """Iterations launched and not yet ended."""
        return self._state.iteration - self._state.num_ended

    def is_in_flight(self, request: Request) -> bool:
        """Whether an iteration in flight computes tokens of this request."""
        return self._state.in_flight_until(request) is not None

    def ready_decodes(self, at_most: int) -> tuple[list[Request], int]:
        """The first of `decoding` whose input is known or will be carried over, and the free blocks that their tokens take."""
        table, decoding = self._state.table, self._state.decoding
        requests, rows = decoding.members, decoding.rows
        if self.limits.num_stages > 1:  # some wait for a token that is still deeper in the pipeline
            ready = table.ready(rows) > 0
            rows, requests = rows[ready], list(compress(requests, ready.tolist()))
        if len(rows) > at_most:
            rows, requests = rows[:at_most], requests[:at_most]
        return requests, len((table.computed[rows] >= self._state.pool.room[rows]).nonzero()[0])

    def plan(self) -> PlanBuilder:
        """A fresh, empty plan for this iteration."""
        return PlanBuilder(self)
