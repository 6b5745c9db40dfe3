"""The builder that fills a policy's plan, call by call, within the limits of batch, tokens and KV cache."""

from collections.abc import Mapping, Set
from contextlib import suppress
from math import inf
from operator import index
from typing import Final

from cbatch.errors import PlanError, TooLongError
from cbatch.kv import blocks_lacking
from cbatch.limits import Resources
from cbatch.plan import Plan, Refusal
from cbatch.request import Request, read_only

_FROM_VIEW = ("_block_size", "_kv", "_limits", "_view")
_IN_PLAN = ("_bulk", "_decodes", "_named", "_num_tokens", "_padding", "_plan", "_refusal", "_shared")
_LEFT = ("_coming_blocks", "_free_blocks", "_places", "_rows_left", "_tokens_left")


class PlanBuilder:
    """Fills the plan of one iteration up to the limits of batch, tokens and KV cache. It cannot build an illegal plan.

    A policy adds requests in the order of its priorities. The attributes are read-only:

    plan: the plan so far. num_tokens, num_requests: tokens in the plan, and requests that compute them.
    tokens_left, rows_left, free_blocks: tokens, requests and KV blocks that are left for this iteration.
    can_admit: whether there is a place for another waiting request.
    refusal: why the latest `add` granted no tokens; None if it granted tokens.
    """

    __slots__ = (*_FROM_VIEW, *_IN_PLAN, *_LEFT)

    plan: Final[Plan] = read_only("_plan")
    num_tokens: Final[int] = read_only("_num_tokens")
    tokens_left: Final[int] = read_only("_tokens_left")
    rows_left: Final[int] = read_only("_rows_left")
    free_blocks: Final[int] = read_only("_free_blocks")
    refusal: Final[Refusal | None] = read_only("_refusal")

    def __init__(self, view: Resources) -> None:
        limits, kv = view.limits, view.kv
        self._plan = Plan()
        self._num_tokens = 0
        self._tokens_left = limits.max_tokens
        self._rows_left = limits.max_batch
        self._free_blocks = kv.num_free
        self._refusal: Refusal | None = None
        self._padding: int | None = None
        self._view, self._limits, self._kv, self._block_size = view, limits, kv, kv.block_size
        self._places = view.num_places
        self._coming_blocks = kv.num_retiring
        self._named: set[Request] = set()  # added one by one, preempted or rejected
        self._bulk: list[Request] = []  # decodes added together; never modified
        self._shared: dict[Request, int] = {}  # blocks that newcomers will share with other requests
        self._decodes: Mapping[Request, int] | None = None  # `decode_blocks`, once a decode is added singly

    @property
    def num_requests(self) -> int:
        return len(self._plan.requests)

    @property
    def can_admit(self) -> bool:
        return self._places > 0 and self._rows_left > 0 and self._tokens_left > 0

    def add(self, request: Request, num_tokens: int | None = None, *, reserve: int = 0, whole: bool = False) -> int:
        """Adds up to `num_tokens` further tokens of a request to the plan. Returns the number of granted tokens.

        Args:
            num_tokens: default all ready tokens; a number below 1, such as the rest of a spent budget, grants none.
            reserve: tokens of KV cache that the request holds from now on, capped at `request.max_tokens` and the whole cache.
                If they do not fit, no tokens are granted.
            whole: grant all `num_tokens` or none.

        Raises:
            TooLongError: `whole` is set, and no iteration can hold that many tokens.
            PlanError: a number of tokens is not whole, or `reserve` is negative.
        """
        if not reserve and request in self._view.decoding and (num_tokens is None or num_tokens >= 1):
            return self._add_decode(request)
        waiting = self._view.is_waiting(request)
        if refusal := self._refusal_of(request, waiting):
            return self._refuse(refusal)
        ready = request.num_ready
        wanted = ready if num_tokens is None else min(num_tokens, ready)
        if wanted <= 0:
            return self._refuse(Refusal.NOT_READY if ready <= 0 else Refusal.NONE_ASKED)
        wanted = _whole(wanted, "num_tokens", request)
        if whole and wanted > self._limits.max_tokens:
            most = f"exceed max_tokens={self._limits.max_tokens}; raise max_tokens, or use a chunking policy"
            raise TooLongError(request, f"{wanted} tokens to compute in one iteration {most}")
        if reserve:
            reserve = _whole(min(reserve, request.max_tokens, self._kv.num_tokens), "reserve", request)
        held, computed = self._num_held(request, waiting), request.num_computed
        room = (held + self._free_blocks) * self._block_size
        granted = min(wanted, self._tokens_left, room - computed)
        if granted <= 0 or reserve > room or (whole and granted < wanted):
            short_of_tokens = self._tokens_left < (wanted if whole else 1)
            return self._refuse(Refusal.TOKENS if short_of_tokens else Refusal.BLOCKS)
        self._free_blocks -= blocks_lacking(max(computed + granted, reserve), held, self._block_size)
        if reserve > held * self._block_size:
            self._plan.reserve[request] = reserve
        if waiting and held:
            self._shared[request] = held
        self._places -= waiting
        return self._grant(request, granted)

    def add_decodes(self, *, at_most: int | None = None, preempt_newest: bool = False) -> int:
        """Adds one token of each request in `View.decoding` that is not yet in the plan. Returns the number of added requests.

        Args:
            at_most: most requests to add; default as many as the limits allow.
            preempt_newest: if the KV cache is full, preempt the newest running request rather than leave an older request
                without its token (PagedAttention, section 4.5).
        """
        room = min(self._rows_left, self._tokens_left)
        if at_most is not None:
            room = max(min(room, at_most), 0)
        named: Set[Request] = {*self._plan.requests, *self._plan.preempt} if self._bulk or self._named else frozenset()
        ready, missing = self._view.ready_decodes(room, named)
        if missing > self._free_blocks:
            return self._add_decodes_singly(room, preempt_newest)
        self._free_blocks -= missing
        self._bulk = [*self._bulk, *ready] if self._bulk else ready
        self._plan.requests.extend(ready)
        self._plan.num_tokens.extend([1] * len(ready))
        self._count(len(ready), len(ready))
        return len(ready)

    def preempt(self, request: Request) -> None:
        """Preempts a running request, and withdraws the tokens that this plan granted the request.

        The request loses its KV blocks, waits again and is recomputed later. Blocks that an iteration in flight still uses become
        free when that iteration ends, too late for this plan.

        Raises PlanError if the request does not run, or is already preempted.
        """
        if request not in self._view.running:
            raise _illegal(request, "preempted, and does not run", "only a running request can be preempted")
        self._depart(request, "preempted")
        self._plan.preempt.append(request)
        self._places += 1
        now, later = self._kv.freed_by_preempting(request)
        self._free_blocks += max(now - sum(self._shared.values()), 0) if self._shared else now
        self._coming_blocks += later

    def wait_for_blocks(self, request: Request, num_tokens: int) -> bool:
        """Returns whether a request's tokens fit into the blocks that become free when the iterations in flight end.

        If so, the blocks are set aside: later calls do not count them for other requests.
        """
        lacking = max(self._kv.num_lacking(request, request.num_computed + num_tokens) - self._free_blocks, 0)
        if lacking > self._coming_blocks:
            return False
        self._coming_blocks -= lacking
        return True

    def reject(self, request: Request, reason: str) -> None:
        """Ends a waiting request unserved, and withdraws the tokens that this plan granted the request.

        Raises PlanError if the request does not wait, or is already rejected.
        """
        if not self._view.is_waiting(request):
            raise _illegal(request, "rejected, and does not wait", "only a waiting request can be rejected")
        self._depart(request, "rejected")
        self._plan.reject.append((request, reason))

    def pad_to(self, num_tokens: int) -> None:
        """Pads the iteration to `num_tokens`, at most `max_tokens`, unless the plan ends up empty or larger."""
        self._padding = index(num_tokens)

    def build(self, note: str = "", *, wake_at: float | None = None) -> Plan:
        """Returns the finished plan. wake_at: seconds, see `Plan`; infinity counts as None."""
        plan = self._plan
        plan.note, plan.wake_at, plan.refusal = note, None if wake_at == inf else wake_at, self._refusal
        if self._padding is not None:
            plan.pad_to = min(max(self._padding, self._num_tokens), self._limits.max_tokens) if plan.requests else None
        return plan

    def _add_decode(self, request: Request) -> int:
        """Adds one token of a decoding request; the fast path of `add` for policies that order all decodes themselves."""
        if self._decodes is None:
            self._decodes = self._view.decode_blocks()
        if self._rows_left <= 0:
            return self._refuse(Refusal.ROWS)
        if request in self._named or (self._bulk and request in self._bulk):
            return self._refuse(Refusal.NAMED)
        if (lacking := self._decodes.get(request)) is None:
            return self._refuse(Refusal.NOT_READY)
        if self._tokens_left < 1 or lacking > self._free_blocks:
            return self._refuse(Refusal.TOKENS if self._tokens_left < 1 else Refusal.BLOCKS)
        self._free_blocks -= lacking
        return self._grant(request, 1)

    def _num_held(self, request: Request, waiting: bool) -> int:
        """Returns the blocks that the request need not take: held blocks, and shared blocks unless a preemption may free them."""
        if not waiting:
            return self._kv.num_held(request)
        return 0 if self._plan.preempt else self._kv.num_shared(request)

    def _refusal_of(self, request: Request, waiting: bool) -> Refusal | None:
        """Returns why the request cannot be added, regardless of tokens and blocks."""
        if self._rows_left <= 0:
            return Refusal.ROWS
        if waiting and self._places <= 0:
            return Refusal.PLACES
        if request in self._named:
            return Refusal.NAMED
        if waiting:
            return None
        if request not in self._view.running:
            return Refusal.GONE
        return Refusal.NAMED if request in self._view.decoding and request in self._bulk else None

    def _grant(self, request: Request, num_tokens: int) -> int:
        self._refusal = None
        self._named.add(request)
        self._plan.requests.append(request)
        self._plan.num_tokens.append(num_tokens)
        self._count(1, num_tokens)
        return num_tokens

    def _refuse(self, refusal: Refusal) -> int:
        self._refusal = refusal
        return 0

    def _count(self, num_requests: int, num_tokens: int) -> None:
        self._rows_left -= num_requests
        self._tokens_left -= num_tokens
        self._num_tokens += num_tokens

    def _depart(self, request: Request, how: str) -> None:
        """Withdraws the tokens and blocks that the plan granted a preempted or rejected request."""
        plan, planned = self._plan, self._plan.requests
        if request in planned:
            place = planned.index(request)
            del planned[place]
            granted, reserve = plan.num_tokens.pop(place), plan.reserve.pop(request, 0)
            held, kept = self._shared.pop(request, 0), max(request.num_computed + granted, reserve)
            held += self._kv.num_held(request)
            self._free_blocks += blocks_lacking(kept, held, self._block_size)
            self._places += self._view.is_waiting(request)
            self._count(-1, -granted)
        elif request in self._named:
            raise _illegal(request, f"{how} twice", "a request is named once in a plan")
        self._named.add(request)

    def _add_decodes_singly(self, room: int, preempt_newest: bool) -> int:
        added = 0
        for request in list(self._view.running):
            if added >= room:
                break
            if request in self._view.decoding:
                granted = self.add(request, 1)
                if preempt_newest and not granted and self._refusal is Refusal.BLOCKS:
                    granted = self._add_by_preempting(request)
                added += granted
        return added

    def _add_by_preempting(self, request: Request) -> int:
        """Preempts newer requests to free a block for `request`, unless enough blocks are about to become free."""
        while self._free_blocks == 0:
            if self.wait_for_blocks(request, 1):
                return 0
            planned = {*self._plan.requests, *self._plan.preempt}
            victim = next(newest for newest in reversed(self._view.running) if newest not in planned)
            self.preempt(victim)
            if victim is request:
                return 0
        return self.add(request, 1)


def _whole(value: int, name: str, request: Request) -> int:
    if type(value) is int and value >= 0:  # nearly always
        return value
    with suppress(TypeError):
        if (whole := index(value)) >= 0:
            return whole
    raise _illegal(request, f"{name}={value!r}", "token counts are whole numbers, at least 0")


def _illegal(request: Request, problem: str, rule: str) -> PlanError:
    return PlanError(f"request {request.id}: illegal plan ({problem}); rule: {rule}")
