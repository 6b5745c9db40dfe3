"""What a policy decides for one iteration, and the builder that does the budget and KV arithmetic for every policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from cbatch.errors import ConfigError
from cbatch.request import Request, Status
from cbatch.request_table import Counters, Ints

if TYPE_CHECKING:
    from cbatch.policy import View


class Plan:
    """An ordered list of (request, num_tokens): who computes how many tokens in the next iteration.

    There is no prefill or decode phase in it: a request with uncomputed prompt left gets a chunk, one without gets 1
    token. A waiting request named in the plan is thereby admitted.

    Attributes:
        requests, num_tokens: the two columns of the list.
        preempt: running requests that give up their KV blocks and go back to waiting; they will be recomputed.
        reject: (waiting request, reason) pairs that end without being served.
        reserve: tokens of KV cache that a request is to hold from now on, where that is more than what it computes.
        pad_to: tokens to pad the iteration to (a tile, or the shape of a captured graph).
        wake_at: with an empty plan, plan again at this time (seconds) if nothing happens before.
        note: free text for the log of this iteration.
    """

    __slots__ = ("note", "num_tokens", "pad_to", "preempt", "reject", "requests", "reserve", "wake_at")

    def __init__(
        self, entries: Iterable[tuple[Request, int]] = (), *, wake_at: float | None = None, note: str = ""
    ) -> None:
        self.requests: list[Request] = []
        self.num_tokens: list[int] = []
        for request, num_tokens in entries:
            self.requests.append(request)
            self.num_tokens.append(num_tokens)
        self.preempt: list[Request] = []
        self.reject: list[tuple[Request, str]] = []
        self.reserve: dict[Request, int] = {}
        self.pad_to: int | None = None
        self.wake_at = wake_at
        self.note = note

    def __iter__(self) -> Iterator[tuple[Request, int]]:
        return zip(self.requests, self.num_tokens, strict=True)

    def __len__(self) -> int:
        return len(self.requests)

    def __repr__(self) -> str:
        return f"Plan({' '.join(f'{request.id}:{count}' for request, count in self)})"


class CheckedPlan(NamedTuple):
    """A plan that keeps the rules, and what was found out in checking it.

    newcomers: the waiting requests among `plan.requests`, in plan order.
    rows: int64 [batch], table rows; -1 before the first admission.
    num_tokens: int64 [batch], tokens to compute. end: int64 [batch], those in the KV cache thereafter.
    taking, num_blocks: places of the requests that take KV blocks, and how many each.
    num_batch_tokens: tokens to compute in all, and num_decodes requests that have only their newest token left.
    counters: of the batch, before the plan is carried out.
    """

    plan: Plan
    newcomers: list[Request]
    rows: Ints
    num_tokens: Ints
    end: Ints
    taking: Ints
    num_blocks: list[int]
    num_batch_tokens: int
    num_decodes: int
    counters: Counters


class PlanBuilder:
    """Fills a plan up to the limits of batch, tokens and KV cache.

    Every `add` grants what fits and says how much that was; it never grants what the engine would refuse. A policy asks
    in the order of its priorities.

    Attributes:
        plan: what is planned so far.
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
        self._limits = limits
        self._block_size = kv.block_size
        self._places = limits.max_running - len(view.running)
        self._coming_blocks = kv.num_retiring

    @property
    def num_requests(self) -> int:
        return len(self.plan.requests)

    @property
    def can_admit(self) -> bool:
        """Whether a waiting request still finds a place."""
        return self._places > 0 and self.rows_left > 0 and self.tokens_left > 0

    def add(self, request: Request, num_tokens: int | None = None, *, reserve: int = 0, whole: bool = False) -> int:
        """Compute up to `num_tokens` (default: all that are ready) further tokens of a request.

        Args:
            reserve: KV cache in tokens that the request must hold from now on; it is not added where that does not fit.
            whole: add all `num_tokens` or nothing.

        Returns:
            Tokens granted, 0 if the request does not fit or has nothing ready.

        Raises:
            ConfigError: `whole`, and an iteration never holds that many tokens.
        """
        waiting = request.status is Status.WAITING
        if self.rows_left <= 0 or (waiting and self._places <= 0) or request in self.plan.preempt:
            return 0
        ready = request.num_ready
        wanted = ready if num_tokens is None else min(num_tokens, ready)
        if whole and wanted > self._limits.max_tokens:
            raise ConfigError(
                f"request {request.id}: {wanted} tokens to compute in one iteration exceed "
                f"max_tokens={self._limits.max_tokens}; raise max_tokens, or use a chunking policy"
            )
        held, computed = self._view.kv.num_held(request), request.num_computed
        room = (held + self.free_blocks) * self._block_size
        granted = min(wanted, self.tokens_left, room - computed)
        if granted <= 0 or reserve > room or (whole and granted < wanted):
            return 0
        self.free_blocks -= max(-(-max(computed + granted, reserve) // self._block_size) - held, 0)
        if reserve > held * self._block_size:
            self.plan.reserve[request] = reserve
        self._places -= waiting
        self.plan.requests.append(request)
        self.plan.num_tokens.append(granted)
        self._count(1, granted)
        return granted

    def add_decodes(self, *, at_most: int | None = None, preempt_newest: bool = False) -> int:
        """Compute one token of each running request that has only its newest token left, in the order of `View.decoding`.

        Args:
            at_most: requests to add; default as many as the limits allow.
            preempt_newest: where the KV cache is full, preempt the newest running request rather than leave an older
                one without its token (PagedAttention, section 4.5).

        Returns:
            Requests added.
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
        """Take the request's KV blocks; it waits again and will be recomputed.

        Blocks that an iteration in flight still uses come free when it has ended, too late for this plan.
        """
        self.plan.preempt.append(request)
        self._places += 1
        blocks = self._view.kv.num_held(request)
        if self._view.is_in_flight(request):
            self._coming_blocks += blocks
        else:
            self.free_blocks += blocks

    def reject(self, request: Request, reason: str) -> None:
        self.plan.reject.append((request, reason))

    def pad_to(self, num_tokens: int) -> None:
        """Pad the iteration to `num_tokens`, if it has fewer and more than none."""
        if self.num_requests:
            self.plan.pad_to = max(num_tokens, self.num_tokens)

    def build(self, note: str = "") -> Plan:
        self.plan.note = note
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
        """Free a block for `request` at the cost of newer ones. Blocks about to come free are worth waiting for."""
        while self.free_blocks == 0:
            if self._coming_blocks > 0:
                self._coming_blocks -= 1
                return 0
            victim = self._newest_outside_plan()
            self.preempt(victim)
            if victim is request:
                return 0
        return self.add(request, 1)

    def _newest_outside_plan(self) -> Request:
        taken = {*self.plan.requests, *self.plan.preempt}
        return next(request for request in reversed(self._view.running) if request not in taken)
