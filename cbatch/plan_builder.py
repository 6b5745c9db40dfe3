"""The builder that fills a policy's plan, call by call, within the limits of batch, tokens and KV cache."""

from collections.abc import Callable, Mapping
from math import inf
from operator import index

from cbatch.errors import TooLongError
from cbatch.kv import blocks_lacking
from cbatch.plan import Plan, Refusal
from cbatch.plan_filling import Filling, check_numbers, illegal, whole_number
from cbatch.request import Request

_USUAL = (int, type(None))  # types of numbers of tokens, which need no check

NumDrafts = int | Mapping[Request, int] | Callable[[Request], int]


class PlanBuilder(Filling):
    """Fills the plan of one iteration up to the limits of batch, tokens and KV cache. It cannot build an illegal plan.

    A policy adds requests in the order of its priorities. The attributes of `Filling` are read-only.
    """

    __slots__ = ()

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
        if type(num_tokens) not in _USUAL or type(reserve) is not int:
            check_numbers(request, num_tokens=num_tokens, reserve=reserve)
        if not reserve and request in self._view.decoding and (num_tokens is None or num_tokens >= 1):
            return self._add_decode(request)
        waiting = self._view.is_waiting(request)
        if refusal := self._refusal_of(request, waiting):
            return self._refuse(refusal)
        ready = request.num_ready
        wanted = ready if num_tokens is None else min(num_tokens, ready)
        if wanted <= 0:
            return self._refuse(Refusal.NOT_READY if ready <= 0 else Refusal.NONE_ASKED)
        wanted = whole_number(wanted, "num_tokens", request)
        if whole and wanted > self._limits.max_tokens:
            most = f"exceed max_tokens={self._limits.max_tokens}; raise max_tokens, or use a chunking policy"
            raise TooLongError(request, f"{wanted} tokens to compute in one iteration {most}")
        if reserve:
            reserve = whole_number(min(reserve, request.max_tokens, self._kv.num_tokens), "reserve", request)
        held, computed = self._num_held(request, waiting), request.num_computed
        room = (held + self._free_blocks) * self._block_size - self._ahead
        granted = min(wanted, self._tokens_left, room - computed)
        if granted <= 0 or reserve > room or (whole and granted < wanted):
            short_of_tokens = self._tokens_left < (wanted if whole else 1)
            return self._refuse(Refusal.TOKENS if short_of_tokens else Refusal.BLOCKS)
        self._free_blocks -= blocks_lacking(max(computed + granted, reserve) + self._ahead, held, self._block_size)
        if reserve > held * self._block_size:
            self._plan.reserve[request] = reserve
        if waiting and held:
            self._shared[request] = held
        self._places -= waiting
        return self._grant(request, granted)

    def add_decodes(
        self, *, at_most: int | None = None, preempt_newest: bool = False, drafts: NumDrafts | None = None
    ) -> int:
        """Adds one token of each request in `View.decoding` that is not yet in the plan. Returns the number of added requests.

        Args:
            at_most: most requests to add, none below 1; default as many as the limits allow.
            preempt_newest: if the KV cache is full, preempt the newest running request rather than leave an older request
                without its token (PagedAttention, section 4.5).
            drafts: drafts of each request, as in `draft`: a number, or a number by request. No request is left out, or preempted, for
                the drafts of another. None: no drafts, as of a request that is not in a mapping.

        Raises PlanError unless drafts are whole numbers of at least 0.
        """
        if drafts is not None:
            return self._add_drafted(at_most, preempt_newest, drafts)
        return self._add_decodes(at_most, preempt_newest)

    def _add_decodes(self, at_most: int | None, preempt_newest: bool) -> int:
        """Adds decodes without drafts."""
        room = min(self._rows_left, self._tokens_left)
        if at_most is not None:
            room = max(min(room, at_most), 0)
        without = {*self._plan.requests, *self._plan.preempt} if self._bulk or self._named else frozenset()
        ready, missing = self._view.ready_decodes(room, without)
        if missing > self._free_blocks:
            return self._add_decodes_singly(room, preempt_newest)
        self._free_blocks -= missing
        self._bulk = [*self._bulk, *ready] if self._bulk else ready
        self._plan.requests.extend(ready)
        self._plan.num_tokens.extend([1] * len(ready))
        self._count(len(ready), len(ready))
        return len(ready)

    def draft(self, request: Request, k: int) -> int:
        """Adds a decode's token and at most `k` drafts (`cbatch.drafts`). Returns the number of granted tokens, 1 + d, or 0.

        The number of drafts d is at most `View.drafts.most`, and what fits: into the request's longest length, the tokens left and the free
        blocks. Without a drafter d is 0. With drafts in flight, `num_tokens` and `num_computed` of the request are upper bounds: they count
        all of them. If they may reach its longest length, the request is not ready until their outcome is known.

        Raises PlanError unless `k` is a whole number of at least 0.
        """
        if not whole_number(k, "k", request) or request not in self._view.decoding:
            return self.add(request, 1)
        return self._add_decode(request) and 1 + self._add_drafts(len(self._plan.requests) - 1, k)

    def preempt(self, request: Request) -> None:
        """Preempts a running request, and withdraws the tokens that this plan granted the request.

        The request loses its KV blocks, waits again and is recomputed later. Blocks that an iteration in flight still uses become
        free when that iteration ends, too late for this plan.

        Raises PlanError if the request does not run, or is already preempted.
        """
        if request not in self._view.running:
            raise illegal(request, "preempted, and does not run", "only a running request can be preempted")
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
            raise illegal(request, "rejected, and does not wait", "only a waiting request can be rejected")
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

    def _add_drafted(self, at_most: int | None, preempt_newest: bool, drafts: NumDrafts) -> int:
        """Adds decodes, and then drafts with what is left, in the same order."""
        decoding, first = self._view.decoding, len(self._plan.requests)
        if isinstance(drafts, Mapping):
            asked = [(request, drafts.get(request, 0)) for request in decoding]
        else:
            asked = [(request, drafts(request) if callable(drafts) else drafts) for request in decoding]
        numbers = {request: k for request, number in asked if (k := whole_number(number, "drafts", request))}
        added = self._add_decodes(at_most, preempt_newest)
        places = [place for place, request in enumerate(self._plan.requests) if place >= first and request in numbers]
        requests = [self._plan.requests[place] for place in places]
        wanted = [numbers[request] for request in requests]
        self._note_asked(max(wanted, default=0))
        if sum(wanted) > self._tokens_left or self._blocks_for(requests, wanted) > self._free_blocks:
            for place, k in zip(places, wanted, strict=True):
                self._add_drafts(place, k)
            return added
        found = [*map(self._view.drafts.propose, requests, wanted)]
        self._free_blocks -= self._blocks_for(requests, found)
        for place, number in zip(places, found, strict=True):
            self._plan.num_tokens[place] += number
        self._count(0, sum(found))
        return added

    def _blocks_for(self, requests: list[Request], drafts: list[int]) -> int:
        """Returns the free blocks that drafts take beyond those of the tokens before them."""
        lacking = self._view.num_lacking
        return lacking(requests, [1 + number for number in drafts]) - lacking(requests, [1] * len(requests))

    def _add_drafts(self, place: int, k: int) -> int:
        """Adds at most `k` drafts to a decode in the plan; returns their number."""
        self._note_asked(k)
        request, size = self._plan.requests[place], self._block_size
        needed = request.num_computed + 1 + self._ahead
        held = max(self._kv.num_held(request), -(-needed // size))
        k = min(k, self._tokens_left, (held + self._free_blocks) * size - needed)
        number = self._view.drafts.propose(request, k) if k > 0 else 0
        self._free_blocks -= blocks_lacking(needed + number, held, size)
        self._plan.num_tokens[place] += number
        self._count(0, number)
        return number

    def _note_asked(self, k: int) -> None:
        self._view.drafts.asked = max(self._view.drafts.asked, k)

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
        while not self.add(request, 1):
            if self._refusal is not Refusal.BLOCKS or self.wait_for_blocks(request, 1):
                return 0
            planned = {*self._plan.requests, *self._plan.preempt}
            victim = next(newest for newest in reversed(self._view.running) if newest not in planned)
            self.preempt(victim)
            if victim is request:
                return 0
        return 1
