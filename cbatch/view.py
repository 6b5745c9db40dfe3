"""What a policy sees of the host that serves its requests, and the builder with which it plans within that host's limits.

`View` and `KVView` are abstract: `engine_view` implements them over this package's engine; another serving system can
implement them over its own state, and the same policies run there.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Reversible, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from cbatch.cost import CostModel
from cbatch.errors import ConfigError
from cbatch.kv import blocks_for, blocks_lacking
from cbatch.limits import Limits
from cbatch.plan import Plan
from cbatch.request import Request


class Requests(Collection[Request], Reversible[Request], Protocol):
    """An ordered, read-only set of requests that follows the host's state."""


class Freed(NamedTuple):
    """KV blocks that preempting a request frees: now, for the plan being made, and later, when an iteration has ended."""

    now: int
    later: int


class KVView(ABC):
    """The KV cache as a policy sees it. Blocks that come free only when an iteration in flight ends count as taken."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    @abstractmethod
    def num_blocks(self) -> int: ...

    @property
    @abstractmethod
    def num_free(self) -> int: ...

    @property
    @abstractmethod
    def num_retiring(self) -> int:
        """Blocks that come free when the iterations in flight have ended."""

    @abstractmethod
    def num_held(self, request: Request) -> int:
        """Blocks that a request holds."""

    @abstractmethod
    def freed_by_preempting(self, request: Request) -> Freed: ...

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def num_lacking(self, request: Request, num_tokens: int) -> int:
        """Blocks that a request needs beyond its own to hold `num_tokens`."""
        return blocks_lacking(num_tokens, self.num_held(request), self.block_size)


class View(ABC):
    """What a policy may look at: the host's state as it is now, without copies. The host sets and updates the attributes.

    now: seconds since the start of the run.
    limits, kv: capacity. cost: predicts the seconds of an iteration of a given shape.
    waiting: requests that have arrived and hold nothing, in arrival order; preempted ones are among them.
    running: admitted requests with tokens left to compute, in admission order.
    decoding: those of `running` that have only their newest token left to compute.
    prefilling: those of `running` with prompt tokens (after a preemption, prompt and output) left.
    """

    now: float
    limits: Limits
    kv: KVView
    cost: CostModel
    waiting: Sequence[Request]
    running: Requests
    decoding: Requests
    prefilling: Requests

    @property
    @abstractmethod
    def iteration(self) -> int:
        """The number of the iteration being planned."""

    @property
    @abstractmethod
    def num_in_flight(self) -> int:
        """Iterations launched and not yet ended."""

    @abstractmethod
    def is_in_flight(self, request: Request) -> bool:
        """Whether an iteration in flight computes tokens of this request."""

    @abstractmethod
    def is_waiting(self, request: Request) -> bool: ...

    @property
    def num_places(self) -> int:
        """Waiting requests that can be admitted before one ends or is preempted."""
        return self.limits.max_running - len(self.running)

    def ready_decodes(self, at_most: int) -> tuple[list[Request], int]:
        """The first of `decoding` that have a token ready to compute, and the free blocks that those tokens take."""
        requests = list(islice((request for request in self.decoding if request.num_ready), at_most))
        return requests, sum(self.kv.num_lacking(request, request.num_computed + 1) for request in requests)

    def plan(self) -> "PlanBuilder":
        """A fresh, empty plan for this iteration."""
        return PlanBuilder(self)


class PlanBuilder:
    """Fills a plan up to the limits of batch, tokens and KV cache.

    Every `add` grants as many tokens as fit and returns their number; it never grants more than the host accepts. A policy
    adds requests in the order of its priorities.

    Attributes:
        plan: the plan so far.
        num_tokens: tokens in it. tokens_left, rows_left: tokens and requests that this iteration can still take.
        free_blocks: KV blocks that are left.
    """

    def __init__(self, view: View) -> None:
        limits, kv = view.limits, view.kv
        self.plan = Plan()
        self.num_tokens = 0
        self.tokens_left = limits.max_tokens
        self.rows_left = limits.max_batch
        self.free_blocks = kv.num_free
        self._view = view
        self._limits, self._kv = limits, kv
        self._block_size = kv.block_size
        self._places = view.num_places
        self._coming_blocks = kv.num_retiring

    @property
    def num_requests(self) -> int:
        return len(self.plan.requests)

    @property
    def can_admit(self) -> bool:
        """Whether a waiting request still finds a place."""
        return self._places > 0 and self.rows_left > 0 and self.tokens_left > 0

    def add(self, request: Request, num_tokens: int | None = None, *, reserve: int = 0, whole: bool = False) -> int:
        """Compute up to `num_tokens` (default: all that are ready) further tokens of a request; returns those granted.

        Args:
            reserve: KV cache in tokens that the request must hold from now on; it is not added where that does not fit.
            whole: add all `num_tokens` or nothing.

        Raises:
            ConfigError: `whole`, and an iteration never holds that many tokens.
        """
        waiting = self._view.is_waiting(request)
        if self.rows_left <= 0 or (waiting and self._places <= 0) or request in self.plan.preempt:
            return 0
        ready = request.num_ready
        wanted = ready if num_tokens is None else min(num_tokens, ready)
        if whole and wanted > self._limits.max_tokens:
            most = f"exceed max_tokens={self._limits.max_tokens}; raise max_tokens, or use a chunking policy"
            raise ConfigError(f"request {request.id}: {wanted} tokens to compute in one iteration {most}")
        held, computed = self._kv.num_held(request), request.num_computed
        room = (held + self.free_blocks) * self._block_size
        granted = min(wanted, self.tokens_left, room - computed)
        if granted <= 0 or reserve > room or (whole and granted < wanted):
            return 0
        self.free_blocks -= blocks_lacking(max(computed + granted, reserve), held, self._block_size)
        if reserve > held * self._block_size:
            self.plan.reserve[request] = reserve
        self._places -= waiting
        self.plan.requests.append(request)
        self.plan.num_tokens.append(granted)
        self._count(1, granted)
        return granted

    def add_decodes(self, *, at_most: int | None = None, preempt_newest: bool = False) -> int:
        """Compute one token of each request in `View.decoding`, in order; returns the number of requests added.

        Args:
            at_most: requests to add; default as many as the limits allow.
            preempt_newest: where the KV cache is full, preempt the newest running request rather than leave an older
                one without its token (PagedAttention, section 4.5).
        """
        room = min(self.rows_left, self.tokens_left)
        if at_most is not None:
            room = min(room, at_most)
        ready, missing = self._view.ready_decodes(room)
        if missing > self.free_blocks:
            return self._add_decodes_singly(room, preempt_newest)
        num_ready = len(ready)
        self.free_blocks -= missing
        self.plan.requests.extend(ready)
        self.plan.num_tokens.extend([1] * num_ready)
        self._count(num_ready, num_ready)
        return num_ready

    def preempt(self, request: Request) -> None:
        """Preempt a running request: it loses its KV blocks, waits again and will be recomputed.

        Blocks that an iteration in flight still uses come free when it has ended, too late for this plan.
        """
        self.plan.preempt.append(request)
        self._places += 1
        now, later = self._kv.freed_by_preempting(request)
        self.free_blocks += now
        self._coming_blocks += later

    def reject(self, request: Request, reason: str) -> None:
        self.plan.reject.append((request, reason))

    def pad_to(self, num_tokens: int) -> None:
        """Pad the iteration to `num_tokens`, if it has fewer and more than none."""
        if self.num_requests:
            self.plan.pad_to = max(num_tokens, self.num_tokens)

    def build(self, note: str = "", *, wake_at: float | None = None) -> Plan:
        """The finished plan. wake_at: seconds; an empty plan is asked for again then, if nothing happens before."""
        self.plan.note, self.plan.wake_at = note, wake_at
        return self.plan

    def _count(self, num_requests: int, num_tokens: int) -> None:
        self.rows_left -= num_requests
        self.tokens_left -= num_tokens
        self.num_tokens += num_tokens

    def _add_decodes_singly(self, room: int, preempt_newest: bool) -> int:
        added = 0
        for request in list(self._view.running):
            if added >= room:
                break
            if request not in self._view.decoding or request in self.plan.preempt:
                continue
            added += self.add(request, 1)  # 0: no block is free, or the token is still deeper in the pipeline
            if preempt_newest and self.plan.requests[-1:] != [request] and request.num_ready:
                added += self._add_by_preempting(request)
        return added

    def _add_by_preempting(self, request: Request) -> int:
        """Free a block for `request` at the cost of newer ones, unless enough blocks are about to come free."""
        while self.free_blocks == 0:
            if self._coming_blocks > 0:
                self._coming_blocks -= 1
                return 0
            planned = {*self.plan.requests, *self.plan.preempt}
            victim = next(newest for newest in reversed(self._view.running) if newest not in planned)
            self.preempt(victim)
            if victim is request:
                return 0
        return self.add(request, 1)
