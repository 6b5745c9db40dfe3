"""The engine's state: queues, counters and KV blocks, and how they change. Knows nothing about policies, executors or clocks.

`apply` carries out a checked plan and returns the `Step` to compute. `absorb` takes in the step's tokens. Between `apply` and
`absorb` the step is in flight. `end` frees the row and the KV blocks of an ended, cancelled or rejected request.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cbatch.draft_outcomes import expect, is_stop, settle
from cbatch.drafts import Drafts
from cbatch.executor import Step, Tokens
from cbatch.kv import BlockPool, PrefixCache, PrefixPool
from cbatch.lease import Lease
from cbatch.plan import CheckedPlan
from cbatch.request import NEVER, FinishReason, Ints, Request, Status, read_only, spec_of
from cbatch.request_table import NONE, ONE, ZERO, Queues, RequestSet, RequestTable


class Absorbed(NamedTuple):
    """The effect of a step's tokens.

    receivers, places: ids of the requests that received a token, and their places in the batch, [tokens] each.
    finished: the ended requests. leaving: those whose first token is known, and that another engine continues.
    """

    receivers: Ints
    places: Ints
    finished: list[Request]
    leaving: list[Request]


class State(Queues):
    """The waiting and running requests, and the blocks that they hold.

    cache: the prefix cache; None: blocks end with their requests.
    ends_text: called with each token of a request with stop strings; returns whether the token completes a stop string.
    hands_over: called once a request has a row; returns whether another engine continues the request after its first token.
    admitted: the running requests, and those whose last token is in flight.
    leases: rows that requests have left behind: see `moves`.
    iteration: number of the next iteration. num_ended: number of absorbed iterations. num_overshoot_tokens: generated for ended requests.
    latest: the step of the latest plan, unless a request has since begun or stopped decoding, or stopped running.
    """

    def __init__(self, table: RequestTable, pool: BlockPool) -> None:
        super().__init__()
        self.table, self.pool = table, pool
        self.cache = PrefixCache(pool, table) if isinstance(pool, PrefixPool) else None
        self.ends_text: Callable[[Request, int], bool] = lambda request, token: False
        self.hands_over: Callable[[Request], bool] = lambda request: False
        self.admitted = RequestSet()
        self.leases: list[Lease] = []
        self.drafts = Drafts()
        self.latest: Step | None = None
        self.num_ended = self.num_overshoot_tokens = 0
        self._ending: dict[int, list[Request]] = {}  # by the iteration in flight that samples their last token
        self._leaving_rows: dict[int, list[int]] = {}  # by the iteration in flight that still uses them

    iteration: int = read_only("table.iteration")

    def holds(self, request: Request) -> bool:
        """Returns whether the request waits or runs here."""
        return request._table is self.table or request in self.waiting

    def in_flight_until(self, request: Request) -> int | None:
        """Returns the last iteration in flight that computes tokens of the request, or None."""
        if request._table is None:
            return None
        last = int(self.table.scheduled_at[request._row])
        return last if last >= self.num_ended else None

    def num_gained(self, preempted: Iterable[Request], newcomers: Sequence[Request]) -> int:
        """Returns the KV blocks that preemptions free at once, minus free blocks that newcomers then find in the prefix cache."""
        rows = [request._row for request in preempted if self.in_flight_until(request) is None]
        if self.cache is None:
            return self.pool.num_gained(rows)
        return self.cache.pool.num_gained(rows, map(self.cache.found, newcomers))

    # -- a plan becomes a step ----------------------------------------------------------------------------------------

    def apply(self, checked: CheckedPlan, now: float) -> Step:
        """Carries out a checked, nonempty plan."""
        plan, newcomers, rows, num_tokens, end, taking, num_blocks, *_, (known, total, start), drafts = checked
        if newcomers:
            for request in newcomers:
                self.admit(request, now)
            for place in (rows < ZERO).nonzero()[0].tolist():
                rows[place] = plan.requests[place]._row
        table = self.table
        found = self.cache.admit(plan.requests, newcomers, start, now) if self.cache is not None else ()
        if num_blocks:
            self.pool.extend_each(rows[taking], num_blocks)
        if self.cache is not None:
            self.cache.register(plan.requests, rows, np.minimum(end, known))
        needed = end if drafts is None else end - drafts  # without the tokens that may be rejected
        sampled = (needed == total).nonzero()[0]
        carry = table.sampled_row[rows]
        if table.carries:
            carry[needed <= known] = NONE
        step = Step(
            index=table.iteration,
            requests=plan.requests,
            rows=rows,
            num_tokens=num_tokens,
            start=start,
            sampled=sampled,
            carry=carry,
            num_batch_tokens=checked.num_batch_tokens,
            num_decode_tokens=checked.num_decodes,
            pad_to=plan.pad_to or checked.num_batch_tokens,
            table=table,
            pool=self.pool,
            note=plan.note,
            found=found,
            drafts=drafts,
            behind=None if drafts is None else table.drafts[rows],
        )
        if self.cache is not None:
            step.copies = self.cache.pool.host.take_copies()
            step.shape()  # shared blocks change later
        table.computed[rows] = end
        table.scheduled_at[rows] = table.iteration
        self.latest = step
        if table.carries and len(sampled) < len(rows):
            # in a pipeline, all tokens were recomputed except a token in flight at the preemption
            lacking = ((end == known) & (known < total)).nonzero()[0]
            self._end_prefills(plan.requests[place] for place in lacking.tolist())
        self._expect_samples(step)
        table.iteration += 1
        return step

    def admit(self, request: Request, now: float) -> None:
        if request._table is None:
            request._row = self.table.admit(spec_of(request), request._prefix and request._prefix.prompt)
            request._table = self.table
            self.fit_pool()
            if self.hands_over(request):  # it leaves `running` with its first token in flight, as by length
                self.table.limit[request._row] = min(request.num_tokens + 1, request.max_tokens)
        super().admit(request, now)
        self.admitted.add(request)

    def fit_pool(self) -> None:
        """Extends the pool to a table that has grown."""
        if self.table.num_rows > len(self.pool.room):
            self.pool.grow(self.table.num_rows)

    def _expect_samples(self, step: Step) -> None:
        """Counts the tokens that the step will sample. Requests begin to decode, or leave `running` before their last token."""
        table, places = self.table, step.sampled
        rows = step.rows[places]
        table.total[rows] = total = table.total[rows] + ONE
        if table.carries:
            table.sampled_at[rows] = step.index
            table.sampled_row[rows] = places
        if len(places) > step.num_decode_tokens:  # every decode samples; the others have completed their prompts
            self._end_prefills(map(step.requests.__getitem__, places.tolist()))
        if step.drafts is not None:  # with drafts in flight, ends are known with the outcome
            places, total = expect(step)
            rows = step.rows[places]
        self._expect_ends(step.requests, places[total >= table.limit[rows]], step.index)

    def _expect_ends(self, requests: list[Request], places: Ints, index: int) -> None:
        """Removes the requests at these places from `running`, since iteration `index` samples their last token."""
        for request in map(requests.__getitem__, places.tolist()):
            self._ending.setdefault(index, []).append(request)
            self.leave(request)

    def _end_prefills(self, requests: Iterable[Request]) -> None:
        for request in filter({*self.prefilling}.__contains__, requests):
            self.begin_decoding(request)
            self.latest = None

    def preempt(self, request: Request) -> None:
        """Frees a request's blocks and makes the request wait again; its output is kept."""
        self.leave(request)
        self.admitted.discard(request)
        row = request._row
        request.lose(self.table.computed.item(row) - self.table.drafts.item(row))
        if self.cache is not None:
            self.cache.release(request)
        self.table.computed[row] = 0
        self.pool.release(row, self.in_flight_until(request))
        self.wait(request)

    # -- a step's tokens come in --------------------------------------------------------------------------------------

    def absorb(self, step: Step, tokens: Tokens | None, now: float, accepted: Ints | None = None) -> Absorbed:
        """Takes in the tokens of the oldest step in flight. tokens, accepted: as in `StepResult`; no tokens if values do not matter."""
        table, places = self.table, step.sampled
        rows = step.rows[places]
        if self._leaving_rows or self.leases:  # a request of this step ended, left or was rejected in flight
            ended = table.ended[rows]
            self.num_overshoot_tokens += int(np.count_nonzero(ended))
            places, rows = places[~ended], rows[~ended]
        self.num_ended = step.index + 1
        if self.cache is not None:
            self.cache.pool.now = now
        receivers, received = table.id[rows], places
        done: dict[Request, FinishReason] = {}
        if step.drafts is None:
            if tokens is not None and table.tokens is not None:
                table.tokens[rows, table.known[rows]] = tokens[places]
            table.known[rows] += ONE
        else:
            counts, done, last = settle(self.drafts, step, places, tokens, accepted, self.ends_text)
            receivers, received, tokens = receivers.repeat(counts), places.repeat(counts), None
            for place in last:
                self._expect_ends(step.requests, place[None], table.scheduled_at.item(step.rows[place]))
        table.last_token_at[rows] = now
        if len(step.sampled) > step.num_decode_tokens:  # some have completed their prompts, perhaps again
            table.first_token_at[rows[np.isnan(table.first_token_at[rows])]] = now
        finished, leaving = self._finished(step, places, tokens, done, now)
        self.pool.retire(step.index)
        for row in self._leaving_rows.pop(step.index, ()):
            table.free(row)
        return Absorbed(receivers, received, finished, leaving)

    def repeat(self, step: Step, num_times: int, now: float) -> None:
        """Counts further iterations of a batch of decodes, each with a token per request. now: end of the last one in seconds."""
        table, rows = self.table, step.rows
        computed, total = table.computed[rows] + num_times, table.total[rows] + num_times
        table.computed[rows], table.total[rows] = computed, total
        table.known[rows] += num_times
        table.last_token_at[rows] = now
        table.iteration, self.num_ended = table.iteration + num_times, self.num_ended + num_times
        table.scheduled_at[rows] = table.iteration - 1
        taking, num_blocks = self.pool.lacking(self.pool.room[rows], computed)
        if num_blocks:
            self.pool.extend_each(rows[taking], num_blocks)
        if self.cache is not None:
            self.cache.register_repeated(step.requests, np.minimum(computed, table.known[rows] - ONE))
        self._expect_ends(step.requests, (total >= table.limit[rows]).nonzero()[0], table.iteration - 1)

    def _finished(
        self, step: Step, places: Ints, tokens: Tokens | None, done: dict[Request, FinishReason], now: float
    ) -> tuple[list[Request], list[Request]]:
        """Ends requests, those that are `done` among them; returns these, and those that another engine continues."""
        leaving: list[Request] = []
        table, rows = self.table, step.rows[places]
        if tokens is not None:
            for place in places[table.can_stop[rows]].tolist():
                request = step.requests[place]
                if is_stop(request, int(tokens[place]), self.ends_text):
                    done[request] = FinishReason.STOP
        if table.has_hidden_lengths:
            for place in places[table.known[rows] == table.stop[rows]].tolist():
                done[step.requests[place]] = FinishReason.STOP
        at_limit = places[table.known[rows] >= table.limit[rows]].tolist() if step.drafts is not None else ()
        for request in dict.fromkeys([*self._ending.pop(step.index, ()), *map(step.requests.__getitem__, at_limit)]):
            if request.status is Status.FINISHED or request in done:  # by an end-of-sequence token
                continue
            if table.limit.item(request._row) < request.max_tokens:
                leaving.append(request)
            else:
                done[request] = FinishReason.LENGTH
        if self.cache is not None and len(done) > 1:  # their blocks are cached in the order of the plan
            done = {request: done[request] for request in step.requests if request in done}
        for request, reason in done.items():
            self.end(request, reason, now)
        return list(done), leaving

    def end(self, request: Request, reason: FinishReason, now: float, why: str = "") -> None:
        """Ends a request in any state. KV blocks and row remain taken while an iteration in flight uses them. why: the `reject_reason`."""
        request.finish_reason, request.reject_reason, request.finished_at = reason, why, now
        if (row := self.close(request)) is not None:
            self.free_row(row)
        request.status = Status.FINISHED

    def close(self, request: Request) -> int | None:
        """Forgets a request, which gets its output. Returns its row, which keeps its blocks until `free_row`; None if it has none."""
        self.leave(request)
        if self.cache is not None:
            self.cache.end(request)
        if request._table is None:
            return None
        self.admitted.discard(request)
        request.count_recomputed(self.table.computed.item(row := request._row))
        request.token_times = self.table.token_times(row)
        request.num_output_tokens, request.output = self.table.close(row, request.num_prompt_tokens)
        request._table, request._row = None, NEVER
        return row

    def free_row(self, row: int) -> None:
        """Frees a row and its blocks, once no iteration in flight uses them."""
        self.free_blocks(row)
        if (last := self.table.scheduled_at.item(row)) < self.num_ended:
            self.table.free(row)
        else:
            self._leaving_rows.setdefault(last, []).append(row)

    def free_blocks(self, row: int, keep: int = 0) -> None:
        """Frees the blocks of a row after the first `keep`, once no iteration in flight uses them."""
        last = self.table.scheduled_at.item(row)
        self.pool.release(row, None if last < self.num_ended else last, keep)

    def leave(self, request: Request) -> None:
        self.latest = None
        super().leave(request)
